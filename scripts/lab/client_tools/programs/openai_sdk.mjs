// OpenAI's SDK for JavaScript: responses with tools over three turns, streamed and not, and errors.
import OpenAI from "openai";
import { alias, check, city, end, found, model, part, port, refused } from "./part.mjs";

const client = new OpenAI({ baseURL: `http://127.0.0.1:${port}/v1`, apiKey: "any", maxRetries: 0 });
const tools = [{ type: "function", name: "find", description: "Finds a city.", parameters: city, strict: true }];

for (const streamed of [false, true]) {
  const input = [{ role: "user", content: part }];
  let said;
  for (let turn = 0; turn < 3; turn++) {
    const asked = { model: alias, input, tools, store: false };
    said = streamed ? await client.responses.stream(asked).finalResponse() : await client.responses.create(asked);
    input.push(...said.output);
    for (const call of said.output.filter((item) => item.type === "function_call")) {
      const output = found(JSON.parse(call.arguments).city);
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
  check(said.status === "completed" && said.output_text === end, said);
}
await refused(OpenAI.NotFoundError, () => client.responses.create({ model: "other", input: "Hello" }));
await refused(OpenAI.BadRequestError, () => client.responses.create({ model, input: "Hello", background: true }));
await refused(OpenAI.NotFoundError, () => client.responses.retrieve("resp_1"));
console.log("tools over three turns, streamed and not, errors");
