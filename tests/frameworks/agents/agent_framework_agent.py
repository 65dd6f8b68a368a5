"""Microsoft's Agent Framework, over responses: its second turn names the first by id."""

import asyncio

from agent_framework.openai import OpenAIChatClient


def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


async def main() -> None:
    agent = OpenAIChatClient(model="gpt-4o-mini").as_agent(name="math", instructions="Use tools.", tools=[calculator])
    print((await agent.run("What is 6*7?")).text)


asyncio.run(main())
