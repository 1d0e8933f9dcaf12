// ollama-js: chats and generations, whole and streamed, tools and structured output.

import { Ollama } from "ollama";
import * as checks from "./checks.mjs";

const client = new Ollama({ host: checks.URL });
const model = checks.MODEL;
const tool = { name: checks.TOOL, description: checks.TOOL_ABOUT, parameters: checks.WEATHER };
const tools = [{ type: "function", function: tool }];
const user = (content, fields = {}) => ({ role: "user", content, ...fields });
const system = () => ({ role: "system", content: checks.rules() });
const ask = (messages, fields = {}) => client.chat({ model, messages, ...fields });
const shareOf = (told) => checks.share(told.prompt_eval_cached_count, told.prompt_eval_count);
const schema = {
  type: "object",
  properties: { city: { type: "string" }, degrees: { type: "integer" } },
  required: ["city", "degrees"],
  additionalProperties: false,
};

// Executes a call, and adds all messages of the turn.
async function converse(messages) {
  const { message } = await ask(messages, { tools });
  const [call] = message.tool_calls;
  messages.push(message, { role: "tool", tool_name: checks.TOOL, content: checks.TOOL_RESULT });
  const last = (await ask(messages, { tools })).message;
  checks.said(last.content, checks.TOOL_RESULT);
  messages.push(last);
  return checks.called(call.function.name, call.function.arguments.city);
}

async function* texts(parts) {
  for await (const part of parts) yield part.message.content;
}

await checks.run({
  chat: async () => checks.said((await ask([user(checks.ASK)])).message.content),
  stream: async () => checks.streamed(texts(await ask([user(checks.ASK)], { stream: true }))),
  generate: async () => checks.said((await client.generate({ model, prompt: checks.ASK })).response),
  tool: () => converse([user(checks.ASK_TOOL)]),
  structured: async () => {
    const { message } = await ask([user(checks.ASK_JSON)], { format: schema });
    return checks.parsed(JSON.parse(message.content));
  },
  second_turn: async () => {
    const messages = [system(), user(checks.ASK_TOOL)];
    await converse(messages);
    return shareOf(await ask([...messages, user(checks.ASK)], { tools }));
  },
  image_second_turn: async () => {
    const messages = [system(), user(checks.ASK, { images: [checks.IMAGE] })];
    const { message } = await ask(messages);
    checks.said(message.content, checks.SEES);
    return shareOf(await ask([...messages, message, user(checks.ASK)]));
  },
  effort: async () =>
    checks.said((await ask([user(checks.ASK)], { think: "high" })).message.content, checks.THINKS_HIGH),
  models: async () => (await client.list()).models.map((one) => one.model).join(", "),
});
