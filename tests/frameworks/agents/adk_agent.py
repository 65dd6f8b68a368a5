"""Google's Agent Development Kit over LiteLLM."""

import asyncio

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


async def main() -> None:
    agent = Agent(name="math", model=LiteLlm("openai/gpt-4o-mini"), instruction="Use tools.", tools=[calculator])
    runner = InMemoryRunner(agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    question = types.Content(role="user", parts=[types.Part(text="What is 6*7?")])
    events = runner.run_async(user_id="user", session_id=session.id, new_message=question)
    async for event in events:
        if event.is_final_response():
            print(event.content.parts[0].text)


asyncio.run(main())
