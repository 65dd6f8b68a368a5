"""Microsoft Agent Framework, over responses."""

import asyncio
import json
import sys

from agent_framework.openai import OpenAIChatClient


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main() -> None:
    client = OpenAIChatClient(model="gpt-4o-mini")
    agent = client.as_agent(name="math", instructions="Use the tool to multiply.", tools=[multiply])
    print((await agent.run(json.load(sys.stdin)["question"])).text)


asyncio.run(main())
