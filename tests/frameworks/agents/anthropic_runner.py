"""Anthropic's SDK with its tool runner, which tries to hold the conversation on the server."""

import anthropic


@anthropic.beta_tool
def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: What to calculate.
    """
    return str(eval(expression))


client = anthropic.Anthropic()
runner = client.beta.messages.tool_runner(
    model="claude-sonnet-4-5",
    max_tokens=1000,
    messages=[{"role": "user", "content": "What is 6*7?"}],
    tools=[calculator],
)
print("".join(block.text for block in runner.until_done().content))
