"""The `anthropic` package with its tool runner."""

import json
import sys

import anthropic


@anthropic.beta_tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a * b)


runner = anthropic.Anthropic().beta.messages.tool_runner(
    model="claude-sonnet-4-5",
    max_tokens=1000,
    max_iterations=4,
    system="Use the tool to multiply.",
    messages=[{"role": "user", "content": json.load(sys.stdin)["question"]}],
    tools=[multiply],
)
print("".join(block.text for block in runner.until_done().content if block.type == "text"))
