// A tool-using agent on the official openai package for Node.js.

import OpenAI from "openai";

const model = process.env.AGL_MODEL ?? "gpt-4o-mini";
const MAX_TURNS = 4;

const calculator = {
  type: "function",
  name: "calculator",
  description: "Evaluate an arithmetic expression.",
  strict: false,
  parameters: {
    type: "object",
    properties: { expression: { type: "string" } },
    required: ["expression"],
  },
};

function calculate(rawArguments) {
  try {
    const expression = String(JSON.parse(rawArguments).expression);
    if (!/^[\d\s+\-*/().]{1,100}$/.test(expression)) return "error: only numbers and + - * / ( ) are allowed";
    return String(Function(`"use strict"; return (${expression})`)());
  } catch {
    return "error: not an expression";
  }
}

async function solve(question) {
  const client = new OpenAI();
  const input = [{ role: "user", content: question }];
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const response = await client.responses.create({ model, input, tools: [calculator] });
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text;
    input.push(...response.output);
    for (const call of calls) {
      input.push({ type: "function_call_output", call_id: call.call_id, output: calculate(call.arguments) });
    }
  }
  return "";
}

const task = process.env.AGL_TASK;
console.log(await solve(task ? JSON.parse(task).question : process.argv.slice(2).join(" ")));
