"""Which sessions are demonstrations: by reward, by agreement, the best of each task, without duplicates.

Learning from the successful ones alone is rejection sampling fine-tuning (Yuan et al. 2023, arXiv:2308.01825); bounds
of a task's pass rate leave out what teaches nothing, because it is always solved, or hardly can be.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentlightning.algorithms.agents import of_target
from agentlightning.algorithms.recorded.sessions import (
    RecordedCall,
    Session,
    Tokenizer,
    read_sessions,
)
from agentlightning.credit.rejection import MISSING_REWARD, Rejection, count_reasons, describe_reasons
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import load_dataset
from agentlightning.trajectory import Trajectory

MIN_VOTES: Final = 3
"""Fewer sessions of a task have no majority."""


async def read_query(query: TrajectoryQuery) -> list[Session]:
    """What a query selects now; empty where that is nothing."""
    return _select((await read_sessions(query.store)).usable, query)[0]


def successful(sessions: Sequence[Session], query: TrajectoryQuery) -> tuple[list[Session], dict[str, int]]:
    """The sessions that the query selects, of those with several rewards the parts that earned it, and how many were
    left out by reason. Raises DatasetError where none is."""
    found, left_out = _select(sessions, query)
    if not found:
        raise DatasetError(_none(sessions, query, left_out))
    return found, left_out


def _select(sessions: Sequence[Session], query: TrajectoryQuery) -> tuple[list[Session], dict[str, int]]:
    if not query.self_verified:
        sessions = [part for session in sessions for part in session.parts()]
    counts: Counter[str] = Counter()
    groups: dict[str, list[Session]] = {}
    for session in sessions:
        groups.setdefault(session.group, []).append(session)
    found: list[Session] = []
    for group in groups.values():
        found += _of_task(group, query, counts)
    return found, {reason: count for reason, count in counts.items() if count}


def _of_task(group: Sequence[Session], query: TrajectoryQuery, counts: Counter[str]) -> list[Session]:
    kept = _agreeing(group) if query.self_verified else _rewarded(group, query, counts)
    if query.self_verified:
        counts["disagrees"] += len(group) - len(kept)
    low, high = query.pass_rate or (0.0, 1.0)
    if not low <= len(kept) / len(group) <= high:
        counts["pass_rate"] += len(kept)
        return []
    if query.deduplicate:
        unique = {_content(session): session for session in reversed(kept)}
        counts["duplicate"] += len(kept) - len(unique)
        kept = [session for session in kept if unique[_content(session)] is session]
    if query.best_of is not None and len(kept) > query.best_of:
        counts["best_of"] += len(kept) - query.best_of
        ranked = sorted(kept, key=lambda session: -(session.reward(query.reward_weights) or 0.0))[: query.best_of]
        kept = [session for session in kept if session in ranked]
    return kept


def _rewarded(group: Sequence[Session], query: TrajectoryQuery, counts: Counter[str]) -> list[Session]:
    scores = [session.score(query.reward_weights) for session in group]
    counts.update(each.reason for each in scores if isinstance(each, Rejection))
    scored = [(each, score) for each, score in zip(group, scores, strict=True) if not isinstance(score, Rejection)]
    kept = [each for each, score in scored if score >= query.threshold]
    counts["below_threshold"] += len(scored) - len(kept)
    return kept


def _agreeing(group: Sequence[Session]) -> list[Session]:
    """The sessions whose last answer is that of the majority; none where there is no majority."""
    answers = [_last_answer(session) for session in group]
    known = Counter(answer for answer in answers if answer)
    if len(group) < MIN_VOTES or not known:
        return []
    answer, votes = known.most_common(1)[0]
    if votes * 2 <= len(group):
        return []
    return [session for session, own in zip(group, answers, strict=True) if own == answer]


def _last_answer(session: Session) -> str:
    answer = session.calls[-1].answer
    return " ".join(str((answer or {}).get("content") or "").split()).casefold()


def _content(session: Session) -> str:
    """What makes two sessions of one task the same: what was answered, by whom."""
    calls = [(call.agent, _without_ids(call.answer) if call.answer else _tokens(call)) for call in session.calls]
    return json.dumps(calls, sort_keys=True, default=str)


def _tokens(call: RecordedCall) -> tuple[int, ...]:
    return () if call.transition is None else call.transition.response_token_ids


def _without_ids(answer: dict[str, object]) -> dict[str, object]:
    calls = answer.get("tool_calls")
    functions = [each.get("function") for each in calls] if isinstance(calls, list) else None
    return {"content": answer.get("content"), "calls": functions}


def _none(sessions: Sequence[Session], query: TrajectoryQuery, left_out: dict[str, int]) -> str:
    shown = describe_reasons(left_out)
    if query.self_verified:
        advice = f"record at least {MIN_VOTES} sessions of each task"
    else:
        scores = [session.score(query.reward_weights) for session in sessions]
        rewards = [score for score in scores if not isinstance(score, Rejection)]
        spans = f"rewards are from {min(rewards):g} to {max(rewards):g}: " if rewards else "there are no rewards: "
        unusable = (each for each in scores if isinstance(each, Rejection) and each.reason != MISSING_REWARD)
        if not rewards and (first := next(unusable, None)):
            return f"none of {len(sessions)} sessions is a demonstration ({shown}); of the first: {first.message}"
        advice = f"{spans}lower threshold={query.threshold:g}, or emit rewards with agl.emit_reward"
    return f"none of {len(sessions)} sessions is a demonstration ({shown or 'there are none'}); {advice}"


# -- demonstrations --------------------------------------------------------------------------------------------------

# What supervised learning imitates: conversations, trajectories, or the successful sessions of a store.


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
    measured = {"modes_val_and_test": sessions.measured} if sessions.measured else {}
    return found, {**count_reasons(sessions.rejected), **counts, **measured}


def to_examples(records: Sequence[Any], tokenizer: Tokenizer) -> tuple[list[Trajectory], dict[str, int]]:
    """The records as trajectories whose sampled tokens are to be imitated, and sessions that cannot be, by reason.
    Raises DatasetError where none can."""
    rejected: list[Rejection] = []
    found = tokenizer.trajectories([each for each in records if not isinstance(each, Session)], rejected)
    target = tokenizer.target
    for session in (each for each in records if isinstance(each, Session)):
        made = tokenizer(session)
        if isinstance(made, Rejection):
            rejected.append(made)
        else:
            found.append(made.trajectory)
    examples = [each for one in found if (each := of_target(one, target)).transitions]
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
