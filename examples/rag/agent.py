"""An agent that answers questions from documents it searches for, written with the OpenAI Agents SDK."""

import os
from functools import cache
from typing import Any

import httpx
from agents import Agent, RunContextWrapper, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.model_settings import ModelSettings
from agents.tool import default_tool_error_function

INSTRUCTIONS = "Search for one fact at a time. Reply <answer>a few words</answer>"


@cache
def retriever() -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=os.environ.get("RETRIEVER_URL", "http://127.0.0.1:8893"), timeout=30)


def explain(context: RunContextWrapper[Any], error: Exception) -> str:
    """Mistakes in a call are explained to the model; without a retriever the run cannot go on."""
    if isinstance(error, httpx.HTTPError):
        raise RuntimeError(f"the retriever at {retriever().base_url} does not answer: {error!r}") from error
    return default_tool_error_function(context, error)


@function_tool(failure_error_function=explain)
async def search(query: str) -> str:
    """Search the documents.

    Args:
        query: Words to look for.
    """
    response = await retriever().post("/search", json={"query": query})
    response.raise_for_status()
    return "\n".join(f"{found['title']}: {found['text']}" for found in response.json()["results"]) or "nothing found"


agent = Agent(
    name="researcher",
    instructions=INSTRUCTIONS,
    tools=[search],
    model=os.environ.get("MODEL", "policy"),
    model_settings=ModelSettings(max_tokens=int(os.environ.get("MAX_TOKENS", "512"))),
)


async def answer(question: str) -> str:
    """The agent's answer; a text without one if it calls tools that there are not, or does not come to an end."""
    try:
        result = await Runner.run(agent, question, max_turns=6)
    except (MaxTurnsExceeded, ModelBehaviorError) as error:
        return f"no answer: {error}"
    return str(result.final_output)
