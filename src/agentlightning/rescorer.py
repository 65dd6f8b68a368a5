"""Applies a new reward function to stored rollouts.

Each rollout gets a new reward span, which names the function and replaces the final reward for everything that reads
the rollout from then on; the spans of earlier rewards stay. Repeating it changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentlightning import span as names
from agentlightning.errors import ConfigError, RewardError
from agentlightning.rollouts import Rollout, RolloutMode, RolloutStatus
from agentlightning.runner.agents.agent import function_spec, load_object
from agentlightning.runner.agents.arguments import RewardFunction
from agentlightning.span import Span, counts
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key
from agentlightning.tracing.rewards import find_final_reward
from agentlightning.training.sources.collector import apply_reward
from agentlightning.trajectory import Reward
from agentlightning.util.event_loop import run_sync

PAGE = 500
"""Rollouts in one request to the store."""


@dataclass(slots=True)
class Rescoring:
    """What `rescore` did.

    >>> from agentlightning.rescorer import Rescoring
    >>> Rescoring(rollouts=3, rescored=2, unchanged=1).failed
    {}
    """

    rollouts: int = 0
    """Rollouts that matched."""
    rescored: int = 0
    """Rollouts with a new reward."""
    unchanged: int = 0
    """Rollouts that the same function had given the same reward."""
    without_attempt: int = 0
    """Rollouts that were never run."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """By rollout id, why the function gave no reward: these keep the one they had."""
    mean_before: float | None = None
    """Mean of the final rewards of the scored rollouts that are plain numbers. None: there are none."""
    mean_after: float | None = None
    dry_run: bool = False
    """Whether nothing was written."""


def rescore(
    store: LightningStoreBase,
    reward: Callable[..., Any] | str,
    *,
    run: str | None = None,
    status: Sequence[RolloutStatus] = ("succeeded",),
    mode: Sequence[RolloutMode] | None = None,
    task: Any = None,
    concurrency: int = 8,
    dry_run: bool = False,
) -> Rescoring:
    """Apply a new reward function to the rollouts of a store. Learning and evaluation then read the new rewards.

    `reward` is a function or `module:function` and gets the arguments of any reward function, and `spans` if it has a
    parameter of that name. `output` is what was stored with the attempt: at most 16,384 characters. Filters: `run`,
    part of the rollout id; `status`; `mode`; `task`, a task or some of its keys with their values. Up to `concurrency`
    functions run at the same time.

    A rollout whose function raises, or returns what is no finite number, keeps its reward and is named in `failed`.
    Raises RewardError if that is so for every rollout, and AgentError for a function that cannot be loaded.

        >>> store = agl.InMemoryLightningStore()
        >>> agl.rescore(store, lambda task, output: 1.0 if output == task["answer"] else 0.0).rollouts
        0
    """
    return run_sync(
        rescore_async(
            store, reward, run=run, status=status, mode=mode, task=task, concurrency=concurrency, dry_run=dry_run
        )
    )


async def rescore_async(
    store: LightningStoreBase,
    reward: Callable[..., Any] | str,
    *,
    run: str | None = None,
    status: Sequence[RolloutStatus] = ("succeeded",),
    mode: Sequence[RolloutMode] | None = None,
    task: Any = None,
    concurrency: int = 8,
    dry_run: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Rescoring:
    """`rescore`, for callers that have an event loop."""
    if concurrency < 1:
        raise ConfigError(f"concurrency={concurrency} runs nothing; use at least 1")
    function = RewardFunction.of(load_object(function_spec(reward), "reward") if isinstance(reward, str) else reward)
    name = reward if isinstance(reward, str) else function.name
    found, limit, after = Rescoring(dry_run=dry_run), asyncio.Semaphore(concurrency), None
    scored = list[tuple[Reward | None, Reward]]()

    async def score(rollout: Rollout) -> None:
        async with limit:
            if (rewards := await _score(store, function, name, rollout, found)) is not None:
                scored.append(rewards)
        found.rollouts += 1
        if on_progress is not None:
            on_progress(found.rollouts)

    while page := await store.query_rollouts(
        status_in=list(status),
        mode_in=None if mode is None else list(mode),
        rollout_id_contains=run,
        after=after,
        limit=PAGE,
    ):
        await asyncio.gather(*(score(each) for each in page if _matches(each.input, task)))
        after = page[-1].rollout_id
    found.failed = dict(sorted(found.failed.items()))
    if found.failed and len(found.failed) == found.rollouts:
        first = next(iter(found.failed))
        raise RewardError(
            f"the function scored none of {found.rollouts} rollouts. The first, {first}: {found.failed[first]}"
        )
    found.mean_before, found.mean_after = _mean([old for old, _ in scored]), _mean([new for _, new in scored])
    return found


def _matches(task: Any, wanted: Any) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, dict) and isinstance(task, dict):
        return all(key in task and task_key(task[key]) == task_key(value) for key, value in wanted.items())
    return task_key(task) == task_key(wanted)


async def _score(
    store: LightningStoreBase, function: RewardFunction, name: str, rollout: Rollout, found: Rescoring
) -> tuple[Reward | None, Reward] | None:
    """Score a rollout by a function of that name, and count it in `found`. Its final reward before, and the new one;
    None where there is none."""
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    if attempt is None:
        found.without_attempt += 1
        return None
    spans = await store.query_spans(rollout.rollout_id, attempt.attempt_id)
    before = find_final_reward(spans)
    try:
        value = await apply_reward(store, function, rollout, attempt, spans)
    except Exception as error:  # noqa: BLE001  the function is the user's code; the rollout is named and counted
        found.failed[rollout.rollout_id] = f"{type(error).__name__}: {error}"
        return None
    rescored = [span for span in spans if names.RESCORED in span.attributes and counts(span)]
    if rescored and rescored[-1].attributes[names.RESCORED] == name and before == value:
        found.unchanged += 1
        return before, value
    found.rescored += 1
    if not found.dry_run:
        content = f"{attempt.attempt_id} rescored {len(rescored)} {name} {value!r}"
        key = names.REWARD_VALUES if isinstance(value, dict) else names.SCORE_VALUE
        span = Span(
            rollout_id=rollout.rollout_id,
            attempt_id=attempt.attempt_id,
            name=names.REWARD,
            start_time=time.time(),
            span_id=hashlib.sha256(content.encode()).hexdigest()[:16],
            attributes={names.EVALUATION_NAME: "reward", key: value, names.RESCORED: name, names.JUDGE: True},
        )
        await store.add_span(span)
    return before, value


def _mean(rewards: Sequence[Reward | None]) -> float | None:
    plain = [reward for reward in rewards if isinstance(reward, float | int)]
    return fmean(plain) if plain else None
