"""Asks a model behind any OpenAI-compatible endpoint, and finds the JSON object in its answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentlightning.errors import ConfigError, MissingRewardError, RewardServiceError
from agentlightning.rewards.base import SHOWN, PerLoop, Portable, check_at_least, check_url, post_json

MOST_CHARACTERS: Final = 24_000
"""Characters of a task, an output or a transcript that a judge is shown: the first and the last half of them."""


@dataclass(frozen=True, eq=False)
class ChatJudge(Portable):
    """The settings that judges have in common."""

    model: str
    """The judge's name at its endpoint."""
    rubric: str
    """What makes an answer good, in words."""
    base_url: str = "https://api.openai.com/v1"
    """An OpenAI-compatible endpoint. Never that of the run: a policy that judges itself is refused."""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the key of the endpoint, where it needs one."""
    timeout: float = 60.0
    """Seconds that a call may take. A call that takes longer, after all retries, leaves the reward missing."""
    retries: int = 2
    """Further tries after a timeout, a failed connection, a status such as 429, or an answer that cannot be read."""
    backoff: float = 0.5
    """Seconds before the first retry, about; doubled for each further one."""
    temperature: float = 0.0
    """The sampling temperature of the judge."""
    max_tokens: int = 1024
    """The length of its answer."""
    concurrency: int = 16
    """Calls at the same time, in each process."""
    _limits: PerLoop[asyncio.Semaphore] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_url(self.base_url, "base_url")
        check_at_least(1, concurrency=self.concurrency, max_tokens=self.max_tokens)
        check_at_least(0, retries=self.retries, backoff=self.backoff, temperature=self.temperature)
        check_at_least(0.001, timeout=self.timeout)
        if not self.model or not self.rubric.strip():
            raise ConfigError("a judge needs a model and a rubric: what makes an answer good, in words")
        object.__setattr__(self, "_limits", PerLoop(lambda: asyncio.Semaphore(self.concurrency)))

    async def _ask(self, system: str, user: str) -> str:
        """The text of the answer. Raises MissingRewardError and RewardServiceError."""
        key = os.environ.get(self.key_variable)
        body = {
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        }
        async with self._limits.get():
            found = await post_json(
                f"{self.base_url.rstrip('/')}/chat/completions",
                body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=self.timeout,
                retries=self.retries,
                backoff=self.backoff,
                source=f"the judge {self.model}",
            )
        try:
            return str(found["choices"][0]["message"]["content"] or "")
        except (LookupError, TypeError):
            raise RewardServiceError(
                f"the judge {self.model} at {self.base_url} answered no chat completion: {str(found)[:SHOWN]!r}"
            ) from None

    def _unreadable(self, what: str, answer: str) -> MissingRewardError:
        return MissingRewardError(
            f"the judge {self.model} gave no {what} in {self.retries + 1} answers; the last one: {answer[-SHOWN:]!r}"
        )


def last_object(text: str, key: str) -> Mapping[str, Any] | None:
    """The last JSON object in a text that has a key; None where there is none.

    >>> last_object('Good. {"score": 1} or better {"score": 2, "why": "{}"}.', "score")
    {'score': 2, 'why': '{}'}
    """
    decoder, found, place = json.JSONDecoder(), None, text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            if isinstance(value, dict) and key in value:
                found = cast("Mapping[str, Any]", value)
        place = text.find("{", end)
    return found


def shown(value: Any) -> str:
    """A value as a judge reads it, shortened in the middle."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=repr)
    if len(text) <= MOST_CHARACTERS:
        return text
    half, left = MOST_CHARACTERS // 2, len(text) - MOST_CHARACTERS
    return f"{text[:half]}\n[... {left} characters left out ...]\n{text[-half:]}"


def fenced(name: str, value: Any, closing: Sequence[str] = ()) -> str:
    """A value between tags, so that a judge can tell it from its instructions."""
    text = shown(value)
    for tag in (name, *closing):
        text = text.replace(f"</{tag}>", f"<\\/{tag}>")
    return f"<{name}>\n{text}\n</{name}>"
