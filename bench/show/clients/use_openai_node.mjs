// openai-node: chat completions with the helpers for streams and parsed objects, and the Responses API.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import * as checks from "./checks.mjs";

const client = new OpenAI({ baseURL: `${checks.URL}/v1`, apiKey: checks.KEY, maxRetries: 0 });
const model = checks.MODEL;
const tool = { name: checks.TOOL, description: checks.TOOL_ABOUT, parameters: checks.WEATHER, strict: true };
const chatTools = [{ type: "function", function: tool }];
const responseTools = [{ type: "function", ...tool }];
const user = (content) => ({ role: "user", content });
const system = () => ({ role: "system", content: checks.rules() });

// ---- chat completions

const ask = (messages, fields = {}) => client.chat.completions.create({ model, messages, ...fields });
const textOf = (answer) => answer.choices[0].message.content;
const shareOf = ({ usage }) => checks.share(usage.prompt_tokens_details?.cached_tokens, usage.prompt_tokens);

function callIn(message) {
  const [call] = message.tool_calls;
  return checks.called(call.function.name, JSON.parse(call.function.arguments).city);
}

// Executes a call, and adds all messages of the turn.
async function converse(messages) {
  const { message } = (await ask(messages, { tools: chatTools })).choices[0];
  const detail = callIn(message);
  messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: checks.TOOL_RESULT });
  const last = (await ask(messages, { tools: chatTools })).choices[0].message;
  checks.said(last.content, checks.TOOL_RESULT);
  messages.push(last);
  return detail;
}

async function* deltas(events) {
  for await (const event of events) yield event.choices[0]?.delta.content;
}

// ---- Responses

const respond = (input, fields = {}) => client.responses.create({ model, input, ...fields });
const responseShare = ({ usage }) => checks.share(usage.input_tokens_details.cached_tokens, usage.input_tokens);

async function* textDeltas(events) {
  for await (const event of events) if (event.type === "response.output_text.delta") yield event.delta;
}

// Executes a call and adds all items of the turn, as a client that stores nothing on the server does.
async function respondAll(input, fields = {}) {
  const first = await respond(input, { tools: responseTools, store: false, ...fields });
  const call = first.output.find((item) => item.type === "function_call");
  const detail = checks.called(call.name, JSON.parse(call.arguments).city);
  input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: checks.TOOL_RESULT });
  const second = await respond(input, { tools: responseTools, store: false, ...fields });
  checks.said(second.output_text, checks.TOOL_RESULT);
  input.push(...second.output);
  return detail;
}

await checks.run({
  chat: async () => checks.said(textOf(await ask([user(checks.ASK)]))),
  stream: async () => checks.streamed(deltas(await ask([user(checks.ASK)], { stream: true }))),
  tool: () => converse([user(checks.ASK_TOOL)]),
  tool_streamed: async () => {
    const events = client.chat.completions.stream({ model, messages: [user(checks.ASK_TOOL)], tools: chatTools });
    return callIn((await events.finalChatCompletion()).choices[0].message);
  },
  structured: async () => {
    const format = zodResponseFormat(checks.Report, "report");
    const messages = [user(checks.ASK_JSON)];
    const answer = await client.chat.completions.parse({ model, messages, response_format: format });
    return checks.parsed(answer.choices[0].message.parsed);
  },
  second_turn: async () => {
    const messages = [system(), user(checks.ASK_TOOL)];
    await converse(messages);
    return shareOf(await ask([...messages, user(checks.ASK)], { tools: chatTools }));
  },
  image_second_turn: async () => {
    const image = { type: "image_url", image_url: { url: checks.IMAGE_URL } };
    const messages = [system(), user([{ type: "text", text: checks.ASK }, image])];
    const { message } = (await ask(messages)).choices[0];
    checks.said(message.content, checks.SEES);
    const second = await ask([...messages, message, user(checks.ASK)]);
    checks.said(textOf(second), checks.SEES);
    return shareOf(second);
  },
  effort: async () =>
    checks.said(textOf(await ask([user(checks.ASK)], { reasoning_effort: "high" })), checks.THINKS_HIGH),
  responses: () => respondAll([user(checks.ASK_TOOL)]),
  responses_by_id: async () => {
    const first = await respond(checks.ASK);
    return checks.said((await respond(checks.ASK, { previous_response_id: first.id })).output_text);
  },
  responses_stream: async () =>
    checks.streamed(textDeltas(client.responses.stream({ model, input: checks.ASK }))),
  responses_structured: async () => {
    const format = zodTextFormat(checks.Report, "report");
    const answer = await client.responses.parse({ model, input: checks.ASK_JSON, text: { format } });
    return checks.parsed(answer.output_parsed);
  },
  responses_second_turn: async () => {
    const instructions = checks.rules();
    const input = [user(checks.ASK_TOOL)];
    await respondAll(input, { instructions });
    return responseShare(await respond([...input, user(checks.ASK)], { instructions, tools: responseTools }));
  },
  responses_image_second_turn: async () => {
    const instructions = checks.rules();
    const image = { type: "input_image", image_url: checks.IMAGE_URL, detail: "auto" };
    const input = [user([{ type: "input_text", text: checks.ASK }, image])];
    const first = await respond(input, { instructions });
    checks.said(first.output_text, checks.SEES);
    const second = await respond([...input, ...first.output, user(checks.ASK)], { instructions });
    checks.said(second.output_text, checks.SEES);
    return responseShare(second);
  },
  responses_effort: async () => {
    const reasoning = { effort: "high", summary: "auto" };
    return checks.said((await respond(checks.ASK, { reasoning })).output_text, checks.THINKS_HIGH);
  },
});
