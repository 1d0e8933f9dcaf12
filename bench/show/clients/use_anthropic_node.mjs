// @anthropic-ai/sdk: messages and streams, a tool round trip, a parsed object, an image, thinking, the cached share.

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import * as checks from "./checks.mjs";

const client = new Anthropic({ baseURL: checks.URL, apiKey: checks.KEY, maxRetries: 0 });
const fixed = { model: checks.MODEL, max_tokens: 2000 };
const tools = [{ name: checks.TOOL, description: checks.TOOL_ABOUT, input_schema: checks.WEATHER }];
const user = (content) => ({ role: "user", content });
const assistant = ({ content }) => ({ role: "assistant", content });

const ask = (messages, fields = {}) => client.messages.create({ ...fixed, messages, ...fields });
const textOf = ({ content }) => content.filter(({ type }) => type === "text").map(({ text }) => text).join("");

function shareOf({ usage }) {
  const cached = usage.cache_read_input_tokens ?? 0;
  return checks.share(cached, usage.input_tokens + cached + (usage.cache_creation_input_tokens ?? 0));
}

// Executes a call, and adds all messages of the turn.
async function converse(messages, fields = {}) {
  const answer = await ask(messages, { tools, ...fields });
  const call = answer.content.find(({ type }) => type === "tool_use");
  const result = { type: "tool_result", tool_use_id: call.id, content: checks.TOOL_RESULT };
  messages.push(assistant(answer), user([result]));
  const last = await ask(messages, { tools, ...fields });
  checks.said(textOf(last), checks.TOOL_RESULT);
  messages.push(assistant(last));
  return checks.called(call.name, call.input.city);
}

async function* textDeltas(events) {
  for await (const event of events) if (event.delta?.type === "text_delta") yield event.delta.text;
}

await checks.run({
  chat: async () => checks.said(textOf(await ask([user(checks.ASK)]))),
  stream: () => checks.streamed(textDeltas(client.messages.stream({ ...fixed, messages: [user(checks.ASK)] }))),
  tool: () => converse([user(checks.ASK_TOOL)]),
  tool_streamed: async () => {
    const events = client.messages.stream({ ...fixed, tools, messages: [user(checks.ASK_TOOL)] });
    const call = (await events.finalMessage()).content.find(({ type }) => type === "tool_use");
    return checks.called(call.name, call.input.city);
  },
  structured: async () => {
    const output_config = { format: zodOutputFormat(checks.Report) };
    const answer = await client.messages.parse({ ...fixed, messages: [user(checks.ASK_JSON)], output_config });
    return checks.parsed(answer.parsed_output);
  },
  second_turn: async () => {
    const system = checks.rules();
    const messages = [user(checks.ASK_TOOL)];
    await converse(messages, { system });
    return shareOf(await ask([...messages, user(checks.ASK)], { system, tools }));
  },
  image_second_turn: async () => {
    const system = checks.rules();
    const source = { type: "base64", media_type: checks.IMAGE_TYPE, data: checks.IMAGE };
    const messages = [user([{ type: "image", source }, { type: "text", text: checks.ASK }])];
    const answer = await ask(messages, { system });
    checks.said(textOf(answer), checks.SEES);
    const second = await ask([...messages, assistant(answer), user(checks.ASK)], { system });
    checks.said(textOf(second), checks.SEES);
    return shareOf(second);
  },
  thinking: async () => {
    const thinking = { type: "enabled", budget_tokens: 1024 };
    return checks.said(textOf(await ask([user(checks.ASK)], { thinking })), checks.THINKS);
  },
  effort: async () => {
    const fields = { thinking: { type: "adaptive" }, output_config: { effort: "high" } };
    return checks.said(textOf(await ask([user(checks.ASK)], fields)), checks.THINKS_HIGH);
  },
});
