"""AutoGen's assistant, which reflects on what a tool gave without being shown the tools."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o-mini")
    agent = AssistantAgent("math", model_client=client, tools=[calculator], max_tool_iterations=3)
    result = await agent.run(task="What is 6*7?")
    print(result.messages[-1].content)
    await client.close()


asyncio.run(main())
