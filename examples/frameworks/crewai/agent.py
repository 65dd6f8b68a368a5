"""A crew of one."""

import json
import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("multiply")
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


question = json.load(sys.stdin)["question"]
agent = Agent(
    role="Mathematician",
    goal="Answer questions.",
    backstory="You use the tool to multiply.",
    tools=[multiply],
    llm=LLM("gpt-4o-mini"),
    max_iter=4,
)
task = Task(description=question, expected_output="The number.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff().raw)
