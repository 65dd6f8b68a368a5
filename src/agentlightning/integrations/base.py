"""What environments have in common: their addresses, `KIND:NAME?size=500&seed=1&option=value`, and one call of a chat
model, for their agents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

import httpx
from pydantic import Field

from agentlightning.errors import AgentError, ConfigError
from agentlightning.util.settings import AtLeastOne, Section, settings_from

HELD_OUT_SHARE: Final = 0.2
"""Share of the tasks that `part=held_out` keeps."""


class Address(Section):
    """Which environment, and which of its tasks."""

    kind: str
    name: str
    size: AtLeastOne = 500
    """Number of tasks."""
    seed: int = 0
    part: Literal["train", "held_out"] | None = None
    """`train` and `held_out` share no task, whatever their sizes and seeds. None: any task."""
    options: dict[str, Any] = Field(default={})
    """Further settings, for the environment itself."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError for text that is no address."""
        kind, _, rest = text.partition(":")
        name, _, query = rest.partition("?")
        if not kind or not name:
            raise ConfigError(f"{text!r} names no environment; write KIND:NAME, as in reasoning_gym:chain_sum?size=200")
        given = dict(parse_qsl(query, keep_blank_values=True))
        own = {key: given.pop(key) for key in ("size", "seed", "part") if key in given}
        options = {key: _value(value) for key, value in given.items()}
        return settings_from(cls, {"kind": kind, "name": name, **own, "options": options}, source=f"from {text}")

    def keeps(self, identity: str) -> bool:
        """Whether a task belongs to the part."""
        if self.part is None:
            return True
        digest = hashlib.sha256(f"{self.kind}:{self.name}:{identity}".encode()).digest()
        held_out = int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32
        return held_out == (self.part == "held_out")

    def number(self, salt: str) -> int:
        """A seed that differs for each seed and salt: neighbouring seeds lead to unrelated tasks."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{salt}".encode()).digest()[:4]) >> 1


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


Message = dict[str, Any]


def model_client(base_url: str, api_key: str) -> httpx.AsyncClient:
    """A client of the model of an attempt, whose calls may take as long as the attempt may."""
    headers = {"authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=None, trust_env=False)


async def chat(client: httpx.AsyncClient, model: str, messages: Sequence[Message]) -> str:
    """The text that the model answers. Raises AgentError with the server's reason if there is none."""
    reply = await client.post("/chat/completions", json={"model": model, "messages": list(messages)})
    if reply.is_error:
        raise AgentError(f"the model {model!r} answered {reply.status_code}: {reply.text[:500]}")
    return str(reply.json()["choices"][0]["message"]["content"] or "")
