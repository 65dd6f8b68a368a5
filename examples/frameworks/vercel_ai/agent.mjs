// The Vercel AI SDK on Node.js.

import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { text } from "node:stream/consumers";
import { z } from "zod";

const multiply = tool({
  description: "Multiply two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a * b,
});

const { question } = JSON.parse(await text(process.stdin));
const result = await generateText({
  model: openai("gpt-4o-mini"),
  system: "Use the tool to multiply.",
  prompt: question,
  tools: { multiply },
  stopWhen: stepCountIs(4),
});
console.log(result.text);
