"""Pydantic AI with OpenAI's responses."""

from pydantic_ai import Agent

agent = Agent("openai:gpt-4o-mini", instructions="Use tools.", name="math")


@agent.tool_plain
def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


print(agent.run_sync("What is 6*7?").output)
