"""A deep agent, with the tools for files and sub-agents that it brings along."""

import json
import sys

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


model = ChatOpenAI(model="gpt-4o-mini")
agent = create_deep_agent(model=model, tools=[multiply], system_prompt="Use the tool to multiply.")
question = {"role": "user", "content": json.load(sys.stdin)["question"]}
state = agent.invoke({"messages": [question]}, {"recursion_limit": 30})
print(state["messages"][-1].content)
