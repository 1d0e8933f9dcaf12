// The checks that every JavaScript driver makes, and the lines that it prints: checks.py in JavaScript.
//
// A driver is run as `node DRIVER URL MODEL [API]`, beside this file, in the folder that has the client's packages.

import { readFileSync } from "node:fs";
import { basename, join } from "node:path";
import { z } from "zod";

export const [URL, MODEL, API = ""] = [process.argv[2].replace(/\/+$/, ""), process.argv[3], process.argv[4]];
export const KEY = "none";

export const ASK = "Say who you are.";
export const ASK_TOOL = "What is the weather in Paris? Use the tool.";
export const ASK_JSON = "Where is it how warm? Reply in JSON.";
export const TOOL = "get_weather";
export const TOOL_ABOUT = "Tells the weather.";
export const TOOL_RESULT = "sunny, 21 degrees";
// The scripted model tells the wish for reasoning that its prompt has, and the number of images.
export const [THINKS, THINKS_NOT] = ["Reasoning: on.", "Reasoning: off."];
export const [THINKS_HIGH, SEES] = ["Reasoning: high.", "Images: 1."];
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const Weather = z.strictObject({ city: z.string() });
export const Report = z.strictObject({ city: z.string(), degrees: z.int() });

// A picture of one pixel, in base64.
export const IMAGE = readFileSync(join(import.meta.dirname, "picture.png"), "base64");
export const IMAGE_TYPE = "image/png";
export const IMAGE_URL = `data:${IMAGE_TYPE};base64,${IMAGE}`;

// Returns a system prompt as long as an agent's, whose first sentence is the driver's own.
export function rules() {
  const rule = (_, n) => `Rule ${n}: answer in one sentence and name no more than ${n} cities.`;
  const lines = Array.from({ length: 300 }, rule);
  return [`You serve ${basename(process.argv[1])} ${API}.`, ...lines].join(" ");
}

function expect(holds, text) {
  if (!holds) throw new Error(text);
}

export function said(text, part = "scripted model") {
  expect((text ?? "").includes(part), `${JSON.stringify(part)} is not in ${JSON.stringify(text)}`);
  return text;
}

export function called(name, city) {
  expect(name === TOOL && city === "Paris", `the call is ${name}(${city})`);
  return `${name}(${city})`;
}

// Checks that an answer comes in more than one piece.
export async function streamed(parts) {
  const pieces = [];
  for await (const part of parts) if (part) pieces.push(part);
  expect(pieces.length > 1, `the stream has ${pieces.length} pieces`);
  return said(pieces.join(""));
}

export function parsed(report) {
  expect(report?.city === "Paris" && report?.degrees === 21, `the object is ${JSON.stringify(report)}`);
  return `${report.city}, ${report.degrees}`;
}

export function share(cached, prompt) {
  return `${cached ?? 0}/${prompt}`;
}

export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    let line;
    try {
      line = { check: name, ok: true, detail: await check() };
    } catch (error) {
      line = { check: name, ok: false, detail: `${error?.name}: ${error?.message}`.slice(0, 600) };
    }
    console.log(JSON.stringify(line));
  }
}
