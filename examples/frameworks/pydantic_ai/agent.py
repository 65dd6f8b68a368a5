"""Pydantic AI. The argument is its model: openai:NAME (responses, the default), openai-chat:NAME or anthropic:NAME."""

import json
import sys

from pydantic_ai import Agent, UsageLimits

model = sys.argv[1] if len(sys.argv) > 1 else "openai:gpt-4o-mini"
agent = Agent(model, instructions="Use the tool to multiply.", name="math")


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


question = json.load(sys.stdin)["question"]
print(agent.run_sync(question, usage_limits=UsageLimits(request_limit=4)).output)
