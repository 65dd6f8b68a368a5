"""A tool-using agent on the official openai package."""

import json
import os

from calculate import DESCRIPTION, PARAMETERS, calculate, question
from openai import OpenAI

MODEL = os.environ.get("AGL_MODEL", "gpt-4o-mini")
CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "description": DESCRIPTION, "parameters": PARAMETERS},
}
MAX_TURNS = 4


def parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def solve(text: str) -> str:
    client = OpenAI()
    messages = [{"role": "user", "content": text}]
    for _ in range(MAX_TURNS):
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=[CALCULATOR]).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculate(parsed(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    print(solve(question()))
