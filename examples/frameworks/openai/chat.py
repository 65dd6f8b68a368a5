"""The `openai` package, over chat completions."""

import json
import sys

from openai import OpenAI

MODEL = "gpt-4o-mini"
SYSTEM = "Use the tool to multiply."
INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
MULTIPLY = {"name": "multiply", "description": "Multiply two numbers.", "parameters": PARAMETERS}
TURNS = 4


def multiply(arguments: str) -> str:
    try:
        values = json.loads(arguments)
        return str(int(values["a"]) * int(values["b"]))
    except (ValueError, KeyError, TypeError):
        return "error: give two integers, a and b"


def answer(question: str) -> str:
    client = OpenAI()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    tools = [{"type": "function", "function": MULTIPLY}]
    for _ in range(TURNS):
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply)
        for call in reply.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


print(answer(json.load(sys.stdin)["question"]))
