// Vercel's `ai` with its providers for Anthropic and OpenAI: tools over three steps, streamed and not, and objects.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { alias, check, city, end, found, part, port } from "./part.mjs";

const providerOptions = { openai: { store: false } };  // otherwise it sends only ids of earlier items
globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = `http://127.0.0.1:${port}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "any" });
const models = [createAnthropic({ baseURL, apiKey: "any" })(alias), openai.responses(alias), openai.chat(alias)];
const find = tool({ description: "Finds a city.", inputSchema: jsonSchema(city), execute: ({ city }) => found(city) });

for (const model of models) {
  const asked = { model, prompt: part, tools: { find }, stopWhen: stepCountIs(3), maxOutputTokens: 2000, maxRetries: 0, providerOptions };
  const said = await generateText(asked);
  check(said.text === end && said.steps.length === 3, [said.text, said.steps.length]);
  const stream = streamText({ ...asked, onError: ({ error }) => { throw error; } });
  let told = "";
  for await (const text of stream.textStream) told += text;
  check(told.endsWith(end) && (await stream.finishReason) === "stop", told);
  const { object } = await generateObject({
    model, prompt: "A city.", schema: jsonSchema(city), maxOutputTokens: 300, temperature: 0, maxRetries: 0,
  });
  check(Object.keys(object).join() === "city", object);
}
console.log("tools over three steps, streamed and not, and objects, by messages, responses and chats");
