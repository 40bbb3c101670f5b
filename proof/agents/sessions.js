// Sessions of the AI SDK: `node sessions.js API URL QUESTION...` asks with two tools, and prints the answers.
// It runs in the folder of the packages. API: chat, responses or messages, and with `-streamed` behind it in streams.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [api, url, ...asked] = process.argv.slice(2);
const [kind, streamed] = api.split("-");
const [model, server] = ["kimi-k2.5-tiny", { baseURL: `${url}/v1`, apiKey: "any" }];
const models = {
  chat: () => createOpenAICompatible({ name: "local", includeUsage: true, ...server })(model),
  responses: () => createOpenAI(server).responses(model),
  messages: () => createAnthropic(server)(model),
};
const facts = { Mia: "33", Tom: "14" };
const declared = (description, properties, execute) =>
  tool({ description, inputSchema: jsonSchema({ type: "object", properties }), execute });
const request = {
  model: models[kind](),
  tools: {
    search: declared("Search.", { name: { type: "string" } }, async ({ name }) => facts[name] ?? "nothing found"),
    add: declared("Add.", { a: { type: "number" }, b: { type: "number" } }, async ({ a, b }) => String(a + b)),
  },
  maxRetries: 0,
  stopWhen: ({ steps }) => steps.length >= 6,
  onError: ({ error }) => process.exit(console.error(error) ?? 1),
  providerOptions: { openai: { store: false }, anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
};
const [messages, said] = [[], []];
for (const content of asked) {
  messages.push({ role: "user", content });
  const answer = streamed ? streamText({ ...request, messages }) : await generateText({ ...request, messages });
  said.push(await answer.text);
  messages.push(...((await answer.responseMessages) ?? (await answer.response).messages)); // those of the whole turn
}
console.log(JSON.stringify(said));
