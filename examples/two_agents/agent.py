"""Two agents that must understand each other: a scout sees which door is open, a guide hears only the scout's word."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx

import agentlightning as agl

WORDS = ("red", "blue", "green")
"""The doors, and the only words that either of them knows."""


def messages(agent: str, heard: str) -> list[dict[str, str]]:
    """What an agent is asked."""
    return [{"role": "user", "content": f"{agent} {heard}"}]


@cache
def http_client() -> httpx.AsyncClient:
    """One for all rollouts of a process."""
    return httpx.AsyncClient(trust_env=False, timeout=60)


async def play(task: dict[str, Any], llm: agl.LLM) -> float:
    """1 if the guide names the open door."""

    async def say(agent: str, heard: str) -> str:
        body = {"model": llm.model, "messages": messages(agent, heard), "max_tokens": 4}
        with agl.track_agent(agent):
            reply = await http_client().post(f"{llm.base_url}/chat/completions", json=body)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"]).strip()

    word = await say("scout", task["open"])
    return float(await say("guide", word) == task["open"])
