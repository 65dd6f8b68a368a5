"""smolagents' tool-calling agent."""

import json
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


agent = ToolCallingAgent(tools=[multiply], model=OpenAIModel("gpt-4o-mini"), max_steps=3, verbosity_level=0)
print(agent.run(json.load(sys.stdin)["question"]))
