// Anthropic's SDK for JavaScript: tools over three turns, streamed and not, and errors.
import Anthropic from "@anthropic-ai/sdk";
import { alias, check, city, end, found, model, part, port, refused } from "./part.mjs";

const client = new Anthropic({ baseURL: `http://127.0.0.1:${port}`, apiKey: "any", maxRetries: 0 });
const tools = [{ name: "find", description: "Finds a city.", input_schema: city }];
const thinking = { type: "enabled", budget_tokens: 1024 };

for (const streamed of [false, true]) {
  const messages = [{ role: "user", content: part }];
  let said;
  for (let turn = 0; turn < 3; turn++) {
    const asked = { model: alias, max_tokens: 2000, messages, tools, thinking };
    said = streamed ? await client.messages.stream(asked).finalMessage() : await client.messages.create(asked);
    check(said.content[0].type === "thinking" && said.content[0].signature, said);
    messages.push({ role: "assistant", content: said.content });
    const uses = said.content.filter((block) => block.type === "tool_use");
    const content = uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: found(use.input.city) }));
    if (uses.length) messages.push({ role: "user", content });
  }
  check(said.stop_reason === "end_turn" && said.content.at(-1).text === end, said);
  check(said.usage.output_tokens > 0, said.usage);
}
const hello = [{ role: "user", content: "Hello" }];
await refused(Anthropic.NotFoundError, () => client.messages.create({ model: "other", max_tokens: 8, messages: hello }));
const { input_tokens: tokens } = await client.messages.countTokens({ model, messages: hello });
check(tokens > 0, tokens);
console.log("tools over three turns with thinking, streamed and not, count, errors");
