"""Strands Agents, which stream."""

import json
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


model = OpenAIModel(model_id="gpt-4o-mini")
agent = Agent(model, tools=[multiply], system_prompt="Use the tool to multiply.", callback_handler=None)
print(agent(json.load(sys.stdin)["question"]))
