"""LlamaIndex's function agent, which streams."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI


def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


async def main() -> None:
    agent = FunctionAgent(tools=[calculator], llm=OpenAI(model="gpt-4o-mini"), system_prompt="Use tools.")
    print(await agent.run("What is 6*7?"))


asyncio.run(main())
