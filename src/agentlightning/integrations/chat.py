"""One call of a chat model, for the agents of environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from agentlightning.errors import AgentError

Message = dict[str, Any]


async def chat(client: httpx.AsyncClient, messages: Sequence[Message], base_url: str, api_key: str, model: str) -> str:
    """The text that the model answers. Raises AgentError with the server's reason if there is none."""
    reply = await client.post(
        f"{base_url.rstrip('/')}/chat/completions",
        json={"model": model, "messages": list(messages)},
        headers={"authorization": f"Bearer {api_key}"},
    )
    if reply.is_error:
        raise AgentError(f"the model {model!r} answered {reply.status_code}: {reply.text[:500]}")
    return str(reply.json()["choices"][0]["message"]["content"] or "")


def client() -> httpx.AsyncClient:
    """A client whose calls may take as long as the attempt may."""
    return httpx.AsyncClient(timeout=None, trust_env=False)
