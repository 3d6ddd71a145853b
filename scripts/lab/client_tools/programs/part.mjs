// What all programs ask; see part.py.
export const port = process.argv[2];
export const model = "served";
export const alias = "claude-sonnet-5";
export const end = "Both are there.";
export const city = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const look = (name) => [{ name: "find", arguments: { city: name } }];
const turns = [{ say: "I look it up.", calls: look("Zürich") }, { say: "One more.", calls: look("Bern") }, { say: end }];
export const part = `play: ${JSON.stringify(turns)}`;

export function found(name) {
  check(["Zürich", "Bern"].includes(name), name);
  return `${name} is there.`;
}

export function check(holds, told) {
  if (!holds) throw new Error(`unexpected: ${JSON.stringify(told)}`);
}

// Errors of an expected class, and nothing else.
export async function refused(kind, asking) {
  const error = await asking().then(() => null, (error) => error);
  check(error instanceof kind, String(error));
  return error;
}
