"""What supervised learning imitates: conversations, trajectories, or the successful sessions of a store."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agentlightning.algorithms.recorded.conversations import to_trajectories
from agentlightning.algorithms.recorded.filters import successful
from agentlightning.algorithms.recorded.sessions import Session, Tokenizer, read_sessions
from agentlightning.chat.base import ChatFormat
from agentlightning.credit import is_target
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import load_dataset
from agentlightning.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Records before they are put into tokens: conversations, trajectories and sessions."""

    training: Sequence[Any]
    validation: Sequence[Any] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sessions that were not chosen, by reason."""


async def load_demonstrations(dataset: Any, validation: Any, *, share: float, seed: int) -> Demonstrations:
    """The records to learn from and to measure on. Raises DatasetError where there is none, and ConfigError for both
    a `share` and a validation set."""
    if validation is not None and share:
        raise ConfigError(f"validation_share={share:g} is for a dataset without validation conversations; leave it out")
    records, left_out = await _records(dataset)
    if validation is not None:
        return Demonstrations(records, (await _records(validation))[0], left_out)
    count = round(share * len(records))
    if share and not 0 < count < len(records):
        raise DatasetError(f"validation_share={share:g} of {len(records)} conversations is {count}; give more of them")
    if not count:
        return Demonstrations(records, (), left_out)
    order = list(range(len(records)))
    random.Random(f"validation/{seed}").shuffle(order)
    chosen = set(order[:count])
    training = [each for index, each in enumerate(records) if index not in chosen]
    return Demonstrations(training, [records[index] for index in sorted(chosen)], left_out)


async def _records(dataset: Any) -> tuple[Sequence[Any], dict[str, int]]:
    if not isinstance(dataset, TrajectoryQuery):
        if isinstance(dataset, list | tuple) and any(isinstance(each, Session | Trajectory) for each in dataset):
            return cast("Sequence[Any]", dataset), {}
        return await asyncio.to_thread(load_dataset, dataset), {}
    sessions = await read_sessions(dataset.store)
    sessions.check()
    found, counts = successful(sessions.usable, dataset)
    rejected = Counter(each.reason for each in sessions.rejected)
    measured = {"modes_val_and_test": sessions.measured} if sessions.measured else {}
    return found, {**rejected, **counts, **measured}


def to_examples(
    records: Sequence[Any], *, target: str | None, chat: ChatFormat, context_length: int, notes: Counter[str]
) -> tuple[list[Trajectory], dict[str, int]]:
    """The records as trajectories whose sampled tokens are to be imitated, and sessions that cannot be, by reason.
    `notes` gets what deviates from the chat template (`conversations.NOTES`). Raises DatasetError where none can."""
    own = [each for each in records if not isinstance(each, Session)]
    rejected: list[Rejection] = []
    found = to_trajectories(own, chat, context_length, notes, rejected)
    tokenizer = Tokenizer(chat, context_length, None, target, notes)
    for session in (each for each in records if isinstance(each, Session)):
        made = tokenizer(session)
        if isinstance(made, Rejection):
            rejected.append(made)
        else:
            found.append(made.trajectory)
    examples = [each for one in found if (each := _of_target(one, target)).transitions]
    counts = Counter(each.reason for each in rejected)
    counts["no_target_calls"] += len(found) - len(examples)
    if not examples:
        seen = sorted({str(call.agent or "calls without a name") for each in found for call in each.transitions})
        first = f" The first: {rejected[0].message}" if rejected else ""
        raise DatasetError(
            f"none of {len(records)} demonstrations can be learned from (target_agent={target!r}; agents seen:"
            f" {', '.join(seen) or 'none'}).{first}"
        )
    return examples, {reason: count for reason, count in counts.items() if count}


def _of_target(trajectory: Trajectory, target: str | None) -> Trajectory:
    if target is None:
        return trajectory
    return replace(trajectory, transitions=tuple(t for t in trajectory.transitions if is_target(t.agent, target)))
