// A tool-using agent in Node.js 20. It knows nothing about training: it reads its task, talks to an OpenAI-compatible
// endpoint, and prints its answer. Only fetch is needed, no package.

const baseUrl = process.env.OPENAI_BASE_URL ?? "https://api.openai.com/v1";
const apiKey = process.env.OPENAI_API_KEY ?? "";
const model = process.env.AGL_MODEL ?? "gpt-4o-mini";
const MAX_TURNS = 4;

const calculator = {
  type: "function",
  function: {
    name: "calculator",
    description: "Evaluate an arithmetic expression.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string" } },
      required: ["expression"],
    },
  },
};

function calculate(rawArguments) {
  let expression;
  try {
    expression = String(JSON.parse(rawArguments).expression);
  } catch {
    return "error: the arguments are not JSON";
  }
  if (!/^[\d\s+\-*/().]+$/.test(expression)) return "error: only numbers and + - * / ( ) are allowed";
  try {
    return String(Function(`"use strict"; return (${expression})`)());
  } catch {
    return "error: not an expression";
  }
}

async function chat(messages) {
  const response = await fetch(`${baseUrl}/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${apiKey}` },
    body: JSON.stringify({ model, messages, tools: [calculator] }),
  });
  if (!response.ok) throw new Error(`${response.status} from ${baseUrl}: ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

async function solve(question) {
  const messages = [{ role: "user", content: question }];
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const message = await chat(messages);
    messages.push(message);
    if (!message.tool_calls?.length) return message.content ?? "";
    for (const call of message.tool_calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: calculate(call.function.arguments) });
    }
  }
  return "";
}

const task = JSON.parse(process.env.AGL_TASK);
console.log(await solve(task.question));
