"""Pydantic AI with Anthropic's messages."""

from pydantic_ai import Agent

agent = Agent("anthropic:claude-sonnet-4-5", instructions="Use tools.", name="math")


@agent.tool_plain
def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


print(agent.run_sync("What is 6*7?").output)
