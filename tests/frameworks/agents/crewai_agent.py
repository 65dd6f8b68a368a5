"""A crew of one."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("calculator")
def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


agent = Agent(role="Math agent", goal="Answer.", backstory="Good at it.", tools=[calculator], llm=LLM("gpt-4o-mini"))
task = Task(description="What is 6*7?", expected_output="The number.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff().raw)
