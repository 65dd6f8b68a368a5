"""The OpenAI Agents SDK."""

import json
import sys

from agents import Agent, Runner, function_tool


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


agent = Agent(name="math", instructions="Use the tool to multiply.", model="gpt-4o-mini", tools=[multiply])
print(Runner.run_sync(agent, json.load(sys.stdin)["question"], max_turns=4).final_output)
