"""AutoGen's assistant."""

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o-mini")
    system = "Use the tool to multiply."
    agent = AssistantAgent("math", model_client=client, tools=[multiply], system_message=system, max_tool_iterations=3)
    result = await agent.run(task=json.load(sys.stdin)["question"])
    print(result.messages[-1].content)
    await client.close()


asyncio.run(main())
