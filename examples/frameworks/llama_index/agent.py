"""LlamaIndex's function agent, which streams."""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main() -> None:
    model = OpenAI(model="gpt-4o-mini")
    agent = FunctionAgent(tools=[multiply], llm=model, system_prompt="Use the tool to multiply.")
    print(await agent.run(json.load(sys.stdin)["question"], max_iterations=4))


asyncio.run(main())
