"""Google's Agent Development Kit, over LiteLLM."""

import asyncio
import json
import sys

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main() -> None:
    model = LiteLlm("openai/gpt-4o-mini")
    agent = Agent(name="math", model=model, instruction="Use the tool to multiply.", tools=[multiply])
    runner = InMemoryRunner(agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    question = types.Content(role="user", parts=[types.Part(text=json.load(sys.stdin)["question"])])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=question):
        if event.is_final_response() and event.content and event.content.parts:
            print("".join(part.text or "" for part in event.content.parts))


asyncio.run(main())
