// LangChain.js: ChatOpenAI over chat completions and Responses, or ChatAnthropic, by the driver's third argument.

import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, SystemMessage, ToolMessage } from "@langchain/core/messages";
import { tool as toolOf } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import * as checks from "./checks.mjs";

const fixed = { model: checks.MODEL, apiKey: checks.KEY, maxRetries: 0 };
const openai = { ...fixed, configuration: { baseURL: `${checks.URL}/v1` } };
const anthropic = { ...fixed, anthropicApiUrl: checks.URL, maxTokens: 2000 };
const make = {
  chat: (fields) => new ChatOpenAI({ ...openai, ...fields }),
  responses: (fields) => new ChatOpenAI({ ...openai, useResponsesApi: true, ...fields }),
  anthropic: (fields) => new ChatAnthropic({ ...anthropic, ...fields }),
}[checks.API];
const model = make({});
// `reasoning` is sent only for names of OpenAI's reasoning models, `modelKwargs` always.
const efforts = {
  chat: { modelKwargs: { reasoning_effort: "high" } },
  responses: { modelKwargs: { reasoning: { effort: "high" } } },
  anthropic: { thinking: { type: "enabled", budget_tokens: 1024 } },
};

const weather = toolOf(async () => checks.TOOL_RESULT, {
  name: checks.TOOL,
  description: checks.TOOL_ABOUT,
  schema: checks.Weather,
});
const bound = model.bindTools([weather]);

function shareOf({ usage_metadata: usage }) {
  return checks.share(usage.input_token_details?.cache_read, usage.input_tokens);
}

// Executes a call, and adds all messages of the turn.
async function converse(messages) {
  messages.push(await bound.invoke(messages));
  const [call] = messages.at(-1).tool_calls;
  messages.push(new ToolMessage({ content: await weather.invoke(call.args), tool_call_id: call.id }));
  messages.push(await bound.invoke(messages));
  checks.said(messages.at(-1).text, checks.TOOL_RESULT);
  return checks.called(call.name, call.args.city);
}

async function* texts(parts) {
  for await (const part of await parts) yield part.text;
}

await checks.run({
  chat: async () => checks.said((await model.invoke(checks.ASK)).text),
  stream: () => checks.streamed(texts(model.stream(checks.ASK))),
  tool: () => converse([new HumanMessage(checks.ASK_TOOL)]),
  tool_streamed: async () => {
    let whole;
    for await (const part of await bound.stream(checks.ASK_TOOL)) whole = whole ? whole.concat(part) : part;
    const [call] = whole.tool_calls;
    return checks.called(call.name, call.args.city);
  },
  structured: async () =>
    checks.parsed(await model.withStructuredOutput(checks.Report, { method: "jsonSchema" }).invoke(checks.ASK_JSON)),
  structured_by_call: async () => {
    const reporter = model.withStructuredOutput(checks.Report, { method: "functionCalling" });
    return checks.parsed(await reporter.invoke(checks.ASK_JSON));
  },
  second_turn: async () => {
    const messages = [new SystemMessage(checks.rules()), new HumanMessage(checks.ASK_TOOL)];
    await converse(messages);
    return shareOf(await bound.invoke([...messages, new HumanMessage(checks.ASK)]));
  },
  image_second_turn: async () => {
    const image = { type: "image", mimeType: checks.IMAGE_TYPE, data: checks.IMAGE };
    const asked = new HumanMessage({ contentBlocks: [{ type: "text", text: checks.ASK }, image] });
    const messages = [new SystemMessage(checks.rules()), asked];
    messages.push(await model.invoke(messages));
    checks.said(messages.at(-1).text, checks.SEES);
    const second = await model.invoke([...messages, new HumanMessage(checks.ASK)]);
    checks.said(second.text, checks.SEES);
    return shareOf(second);
  },
  effort: async () => {
    const part = checks.API === "anthropic" ? checks.THINKS : checks.THINKS_HIGH;
    return checks.said((await make(efforts[checks.API]).invoke(checks.ASK)).text, part);
  },
});
