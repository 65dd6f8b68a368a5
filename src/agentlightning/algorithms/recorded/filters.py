"""Which sessions are demonstrations: by reward, by agreement, the best of each task, without duplicates.

Learning from the successful ones alone is rejection sampling fine-tuning (Yuan et al. 2023, arXiv:2308.01825); bounds
of a task's pass rate leave out what teaches nothing, because it is always solved, or hardly can be.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Final

from agentlightning.algorithms.recorded.sessions import RecordedCall, Session, missing_rewards, read_sessions
from agentlightning.errors import DatasetError
from agentlightning.store.trajectory_query import TrajectoryQuery

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
    rewards = [session.reward(query.reward_weights) for session in group]
    counts.update(each.reason for each in missing_rewards(group, query.reward_weights))
    counts["below_threshold"] += sum(reward is not None and reward < query.threshold for reward in rewards)
    pairs = zip(group, rewards, strict=True)
    return [session for session, reward in pairs if reward is not None and reward >= query.threshold]


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
    shown = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in left_out.items())
    if query.self_verified:
        advice = f"record at least {MIN_VOTES} sessions of each task"
    else:
        rewards = [reward for session in sessions if (reward := session.reward(query.reward_weights)) is not None]
        spans = f"rewards are from {min(rewards):g} to {max(rewards):g}: " if rewards else "there are no rewards: "
        unusable = (found for each in sessions if (found := each.unusable_reward(query.reward_weights)))
        if not rewards and (first := next(unusable, None)):
            return f"none of {len(sessions)} sessions is a demonstration ({shown}); of the first: {first.message}"
        advice = f"{spans}lower threshold={query.threshold:g}, or emit rewards with agl.emit_reward"
    return f"none of {len(sessions)} sessions is a demonstration ({shown or 'there are none'}); {advice}"
