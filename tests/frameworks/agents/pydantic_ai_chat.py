"""Pydantic AI with OpenAI's chat completions."""

from pydantic_ai import Agent

agent = Agent("openai-chat:gpt-4o-mini", instructions="Use tools.", name="math")


@agent.tool_plain
def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


print(agent.run_sync("What is 6*7?").output)
