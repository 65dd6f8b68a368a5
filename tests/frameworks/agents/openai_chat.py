"""OpenAI's SDK, chat completions, with a loop of its own."""

import json

from openai import OpenAI

MODEL = "gpt-4o-mini"
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Calculates.", "parameters": SCHEMA}}]

client = OpenAI()
messages = [{"role": "user", "content": "What is 6*7?"}]
while True:
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
    messages.append(reply)
    if not reply.tool_calls:
        break
    for call in reply.tool_calls:
        value = eval(json.loads(call.function.arguments)["expression"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})
print(reply.content)
