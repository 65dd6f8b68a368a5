"""The OpenAI Agents SDK, over responses."""

from agents import Agent, Runner, function_tool


@function_tool
def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


agent = Agent(name="math", instructions="Use tools.", model="gpt-4o-mini", tools=[calculator])
print(Runner.run_sync(agent, "What is 6*7?").final_output)
