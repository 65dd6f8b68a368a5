"""LangChain's `create_agent`."""

import json
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


agent = create_agent("openai:gpt-4o-mini", tools=[multiply], system_prompt="Use the tool to multiply.")
question = {"role": "user", "content": json.load(sys.stdin)["question"]}
state = agent.invoke({"messages": [question]}, {"recursion_limit": 10})
print(state["messages"][-1].content)
