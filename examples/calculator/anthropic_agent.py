"""A tool-using agent on the official anthropic package."""

import os

from anthropic import Anthropic
from calculate import DESCRIPTION, PARAMETERS, calculate, question

MODEL = os.environ.get("AGL_MODEL", "claude-haiku-4-5")
CALCULATOR = {"name": "calculator", "description": DESCRIPTION, "input_schema": PARAMETERS}
MAX_TURNS = 4
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "512"))


def solve(text: str) -> str:
    client = Anthropic()
    messages = [{"role": "user", "content": text}]
    for _ in range(MAX_TURNS):
        reply = client.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=messages, tools=[CALCULATOR])
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in reply.content if block.type == "text")
        messages.append({"role": "assistant", "content": reply.content})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": calculate(call.input)} for call in calls]
        messages.append({"role": "user", "content": results})
    return ""


if __name__ == "__main__":
    print(solve(question()))
