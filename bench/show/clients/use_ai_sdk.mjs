// The AI SDK with one of its providers, which the driver's third argument names.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import * as checks from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { name: "rootstock", baseURL: `${checks.URL}/v1`, apiKey: checks.KEY };
const model = {
  compatible: () =>
    createOpenAICompatible({ ...settings, includeUsage: true, supportsStructuredOutputs: true })(checks.MODEL),
  responses: () => createOpenAI(settings).responses(checks.MODEL),
  chat: () => createOpenAI(settings).chat(checks.MODEL),
  anthropic: () => createAnthropic(settings)(checks.MODEL),
}[checks.API]();

// Without this option, the Responses provider sends an effort only for names of OpenAI's reasoning models.
const providerOptions = { openai: { forceReasoning: true } };
const fixed = { model, maxRetries: 0, maxOutputTokens: 2000, stopWhen: isStepCount(3), providerOptions };
const tools = (cities) => ({
  [checks.TOOL]: tool({
    description: checks.TOOL_ABOUT,
    inputSchema: checks.Weather,
    execute: async ({ city }) => {
      cities.push(city);
      return checks.TOOL_RESULT;
    },
  }),
});
const user = (content) => ({ role: "user", content });
const shareOf = ({ usage }) => checks.share(usage.inputTokenDetails.cacheReadTokens, usage.inputTokens);

async function weather(ask) {
  const cities = [];
  checks.said(await ask({ ...fixed, prompt: checks.ASK_TOOL, tools: tools(cities) }), checks.TOOL_RESULT);
  return checks.called(checks.TOOL, cities.join());
}

// Asks twice, with the messages of the first turn in the second.
async function twice(first, part, fields = {}) {
  const whole = { ...fixed, instructions: checks.rules(), ...fields };
  const answer = await generateText({ ...whole, messages: [first] });
  checks.said(answer.text, part);
  const messages = [first, ...answer.responseMessages, user(checks.ASK)];
  const second = await generateText({ ...whole, messages });
  checks.said(second.text);
  if (part === checks.SEES) checks.said(second.text, part);
  return shareOf(second);
}

async function reasoning(effort, part) {
  return checks.said((await generateText({ ...fixed, prompt: checks.ASK, reasoning: effort })).text, part);
}

await checks.run({
  chat: async () => checks.said((await generateText({ ...fixed, prompt: checks.ASK })).text),
  stream: () => checks.streamed(streamText({ ...fixed, prompt: checks.ASK }).textStream),
  tool: () => weather(async (fields) => (await generateText(fields)).text),
  tool_streamed: () => weather(async (fields) => await streamText(fields).text),
  structured: async () => {
    const output = Output.object({ schema: checks.Report });
    return checks.parsed((await generateText({ ...fixed, prompt: checks.ASK_JSON, output })).output);
  },
  second_turn: () => twice(user(checks.ASK_TOOL), checks.TOOL_RESULT, { tools: tools([]) }),
  image_second_turn: () => {
    const image = { type: "file", mediaType: checks.IMAGE_TYPE, data: checks.IMAGE };
    return twice(user([{ type: "text", text: checks.ASK }, image]), checks.SEES);
  },
  effort: () => reasoning("high", checks.API === "anthropic" ? checks.THINKS : checks.THINKS_HIGH),
  effort_none: () => reasoning("none", checks.THINKS_NOT),
});
