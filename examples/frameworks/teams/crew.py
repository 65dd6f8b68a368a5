"""A crew of a researcher, a writer and an editor, with a task each."""

import json
import sys

from crewai import LLM, Agent, Crew, Task

GOALS = {"researcher": "Name a fact.", "writer": "Write a sentence on it.", "editor": "Shorten it."}
topic = json.load(sys.stdin)["topic"]

llm = LLM("gpt-4o-mini", max_tokens=12)
agents = [Agent(role=role, goal=goal, backstory="You work in a team.", llm=llm) for role, goal in GOALS.items()]
tasks = [Task(description=f"{topic} {agent.goal}", expected_output="One line.", agent=agent) for agent in agents]
print(Crew(agents=agents, tasks=tasks).kickoff().raw)
