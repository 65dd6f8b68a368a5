"""`RemoteReward`: a reward function behind an HTTP endpoint, for rewards that need another machine or language.

It posts batches, and expects one reward for each item, in order: a number, an object of numbers by dimension, or null
for none.

    request   {"items": [{"task": ..., "output": ..., "rollout_id": "ro-..."}, ...]}
    response  {"rewards": [0.5, {"correctness": 1.0, "format": 0.5}, null, ...]}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from agentlightning.errors import MissingRewardError, RewardServiceError
from agentlightning.rewards.base import SHOWN, PerLoop, Portable, check_at_least, check_url, post_json
from agentlightning.trajectory import Reward
from agentlightning.util.json_values import dumps, loads
from agentlightning.util.printable import shown_url


@dataclass(slots=True)
class _Batch:
    """Items that travel in one request."""

    items: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    full: asyncio.Event = field(default_factory=asyncio.Event)


Waiting = list[tuple[_Batch, "asyncio.Task[list[Any]]"]]
"""The batch that items join, and its rewards; empty where there is none."""


@dataclass(frozen=True, eq=False)
class RemoteReward(Portable):
    """A reward function behind `url`, usable wherever a reward function is.

    Calls made at the same time travel in one request. Raises MissingRewardError (the rollout has no reward) where the
    service gives null or times out, and RewardServiceError (the attempt fails) where it cannot be reached or answers
    something else; ConfigError for arguments that cannot work.

        >>> agl.RemoteReward("http://scorer.example/score", timeout=5).batch_size
        32
    """

    url: str
    """Where batches are posted."""
    batch_size: int = 32
    """The largest number of items in a request."""
    batch_seconds: float = 0.02
    """How long an item waits for others."""
    timeout: float = 60.0
    """Seconds that a request may take."""
    retries: int = 3
    """Further tries after a timeout, a connection that failed, or a status such as 429 and 503."""
    backoff: float = 0.5
    """Seconds before the first retry, about; doubled for each further one."""
    token_variable: str | None = None
    """The environment variable whose value is sent as a bearer token. None: no token is sent."""
    _waiting: PerLoop[Waiting] = field(default_factory=lambda: PerLoop(Waiting), init=False, repr=False)

    def __post_init__(self) -> None:
        check_url(self.url, "url")
        check_at_least(1, batch_size=self.batch_size)
        check_at_least(0, batch_seconds=self.batch_seconds, retries=self.retries, backoff=self.backoff)
        check_at_least(0.001, timeout=self.timeout)

    async def __call__(self, task: Any, output: Any, rollout: Any = None) -> Reward:
        item = {"task": task, "output": output, "rollout_id": getattr(rollout, "rollout_id", None)}
        reward = await self._ask(item)
        if reward is None:
            raise MissingRewardError(f"the reward service at {shown_url(self.url)} gave this rollout no reward (null)")
        return reward

    async def _ask(self, item: dict[str, Any]) -> Any:
        waiting = self._waiting.get()
        if not waiting:
            batch = _Batch()
            waiting.append((batch, asyncio.create_task(self._send(batch, waiting))))
        batch, rewards = waiting[0]
        batch.items.append(item)
        place = len(batch.items) - 1
        if len(batch.items) >= self.batch_size:
            batch.full.set()
            waiting.clear()
        return (await asyncio.shield(rewards))[place]  # Others wait for it, too.

    async def _send(self, batch: _Batch, waiting: Waiting) -> list[Any]:
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), self.batch_seconds)
        if not batch.full.is_set():
            waiting.clear()
        try:
            return await self._rewards(batch.items)
        except (MissingRewardError, RewardServiceError):
            raise
        except Exception as error:
            raise RewardServiceError(
                f"the request to the reward service at {shown_url(self.url)} failed: {error!r}"
            ) from error

    async def _rewards(self, items: list[dict[str, Any]]) -> list[Any]:
        body = loads(dumps({"items": items}, default=repr, option=_ANY))
        found = await post_json(
            self.url,
            body,
            key_variable=self.token_variable,
            timeout=self.timeout,
            retries=self.retries,
            backoff=self.backoff,
            source="the reward service",
        )
        rewards: Any = cast("Mapping[str, Any]", found).get("rewards") if isinstance(found, Mapping) else None
        if not isinstance(rewards, list) or len(cast("list[Any]", rewards)) != len(items):
            raise RewardServiceError(
                f"the reward service at {shown_url(self.url)} answered {str(found)[:SHOWN]!r}, where"
                f' {{"rewards": [...]}} with {len(items)} rewards was expected, in the order of the items'
            )
        return cast("list[Any]", rewards)


_ANY = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
