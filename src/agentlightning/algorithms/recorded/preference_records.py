"""Preference pairs from records: `{"prompt": ..., "chosen": ..., "rejected": ...}`, as TRL reads and `agl export --to
dpo-jsonl` writes them.

Each part is a list of messages in OpenAI's form, or a text, which is one message: the user's in the prompt, the
assistant's in an answer. Without a prompt, what both conversations begin with is the prompt. `tools` may be there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias, cast

from agentlightning.algorithms.agents import of_target
from agentlightning.algorithms.recorded.sessions import Tokenizer, renamed
from agentlightning.chat.base import Message
from agentlightning.chat.messages import read_message, read_tools
from agentlightning.credit import is_target
from agentlightning.credit.rejection import NO_TARGET_CALLS, Rejection
from agentlightning.errors import DatasetError
from agentlightning.task import json_lines, load_dataset
from agentlightning.trajectory import Trajectory, Transition

# -- pairs -----------------------------------------------------------------------------------------------------------

# Preference pairs from rewards: of whole sessions of one task, or of branches of one token tree. Pure.
#
# Sessions: one with a higher reward is preferred to one with a lower reward. Branches: calls of a task with the same
# prompt tokens lead on to different rewards; an answer is worth the mean reward of the sessions that it belongs to, and
# only the tokens of the two answers are compared, so that what both sessions have in common teaches nothing.

PairsOf: TypeAlias = Literal["sessions", "branches"]


@dataclass(frozen=True, slots=True)
class Preference:
    """What is preferred, and what it is preferred to. Their calls are those that are compared."""

    chosen: Trajectory
    rejected: Trajectory
    difference: float
    """By how much the rewards differ."""


def preference_pairs(
    group: Sequence[tuple[Trajectory, float]],
    *,
    of: PairsOf,
    most: int,
    min_difference: float,
    target: str | None,
    rng: random.Random,
) -> list[Preference]:
    """At most `most` pairs of one task's sessions, given with their rewards, the largest differences first; each
    session is used about equally often."""
    candidates = [(of_target(each, target), reward) for each, reward in group]
    candidates = [(each, reward) for each, reward in candidates if each.transitions]
    found = _pairs(candidates, min_difference) if of == "sessions" else _branches(candidates, min_difference)
    rng.shuffle(found)
    found.sort(key=lambda pair: -pair.difference)
    return _balanced(found, most)


def _pairs(candidates: Sequence[tuple[Trajectory, float]], least: float) -> list[Preference]:
    return [
        Preference(good, bad, high - low)
        for good, high in candidates
        for bad, low in candidates
        if high - low >= least and high > low and _tokens(good) != _tokens(bad)
    ]


def _branches(candidates: Sequence[tuple[Trajectory, float]], least: float) -> list[Preference]:
    """Pairs of answers to the same prompt tokens."""
    worth: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[Trajectory, Transition, float]]]] = {}
    for trajectory, reward in candidates:
        for call in trajectory.transitions:
            answers = worth.setdefault(call.prompt_token_ids, {})
            answers.setdefault(call.response_token_ids, []).append((trajectory, call, reward))
    found: list[Preference] = []
    for answers in worth.values():
        means = [(*own[0][:2], fmean(reward for *_, reward in own)) for own in answers.values()]
        for good, chosen, high in means:
            for bad, rejected, low in means:
                if high - low >= least and high > low:
                    found.append(Preference(_only(good, chosen), _only(bad, rejected), high - low))
    return found


def _balanced(pairs: Sequence[Preference], most: int) -> list[Preference]:
    """The first pairs, those of sessions that were used least before the others."""
    used: dict[str, int] = {}
    chosen: list[Preference] = []
    left = list(pairs)
    while left and len(chosen) < most:
        best = min(left, key=lambda pair: _uses(pair, used))
        left.remove(best)
        chosen.append(best)
        for each in (best.chosen, best.rejected):
            used[each.rollout_id] = used.get(each.rollout_id, 0) + 1
    return chosen


def _uses(pair: Preference, used: dict[str, int]) -> int:
    return used.get(pair.chosen.rollout_id, 0) + used.get(pair.rejected.rollout_id, 0)


def _tokens(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [call.response_token_ids for call in trajectory.transitions]


def _only(trajectory: Trajectory, call: Transition) -> Trajectory:
    return replace(trajectory, transitions=(call,))


FORM: Final = 'give {"prompt": [messages], "chosen": [messages], "rejected": [messages]}, or texts in their place'
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
PREFERRED: Final = 1.0
"""The reward of what is chosen; what is rejected has 0.0."""
LINES: Final = frozenset({".jsonl", ".ndjson"})


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    """One pair, in messages."""

    where: str
    """`pairs.jsonl, line 3`."""
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    """What follows the prompt; at least one message of it is the assistant's."""
    rejected: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


def load_preferences(source: Any) -> list[PreferenceRecord]:
    """The pairs of what `load_dataset` reads. Raises DatasetError that names the
    line and the field of what is wrong."""
    return [_record(each, where) for where, each in _values(source)]


def _values(source: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(source, str | Path) and Path(source).suffix.lower() in LINES and Path(source).is_file():
        rows = list(json_lines(Path(source)))
        if not rows:
            raise DatasetError(f"{source} has no preference pair; at least one line is needed: {FORM}")
        yield from rows
        return
    name = f"{source}, record" if isinstance(source, str | Path) else "pair"
    for number, value in enumerate(load_dataset(source), 1):
        yield f"{name} {number}", value


def _record(value: Any, where: str) -> PreferenceRecord:
    if not isinstance(value, dict):
        raise DatasetError(f"{where} is a {type(value).__name__}, not an object; {FORM}")
    fields = cast("dict[str, Any]", value)
    chosen, rejected = (_messages(fields, name, "assistant", where) for name in ("chosen", "rejected"))
    if fields.get("prompt") is None:
        prompt = _common(chosen, rejected)
        if not prompt:
            raise DatasetError(
                f"{where}: prompt is missing, and chosen and rejected have no beginning in common; {FORM}"
            )
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        prompt = _messages(fields, "prompt", "user", where)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            raise DatasetError(f"{where}: {name} has no message of the assistant after the prompt; {FORM}")
    if chosen == rejected:
        raise DatasetError(f"{where}: chosen and rejected are equal, so nothing is preferred; remove the line")
    return PreferenceRecord(
        where, prompt, chosen, rejected, tuple(read_tools(f"{where}: tools", fields.get("tools")) or ())
    )


def _messages(fields: Mapping[str, Any], name: str, role: str, where: str) -> tuple[Message, ...]:
    value = fields.get(name)
    if value is None:
        raise DatasetError(f"{where}: {name} is missing; {FORM}")
    if isinstance(value, str):
        if not value:
            raise DatasetError(f"{where}: {name} is empty; {FORM}")
        return ({"role": role, "content": value},)
    turns = cast("list[Any]", value) if isinstance(value, list) else []
    if not turns:
        raise DatasetError(f"{where}: {name} is {_shown(value)}; {FORM}")
    for place, turn in enumerate(turns):
        given = cast("dict[str, Any]", turn).get("role") if isinstance(turn, dict) else None
        if given not in ROLES:
            raise DatasetError(f"{where}: {name}[{place}] is {_shown(turn)}; a message has a role and content; {FORM}")
        content = turn.get("content")
        if not (isinstance(content, str | list) or (given == "assistant" and turn.get("tool_calls"))):
            raise DatasetError(f"{where}: {name}[{place}].content is {_shown(content)}, not a text; {FORM}")
    return tuple(read_message(f"{where}: {name}[{place}]", turn) for place, turn in enumerate(turns))


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> tuple[Message, ...]:
    length = 0
    while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
        length += 1
    return tuple(chosen[:length])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# -- tokens ------------------------------------------------------------------------------------------------------------


def to_preferences(
    records: Sequence[PreferenceRecord], tokenizer: Tokenizer
) -> tuple[list[Trajectory], list[Rejection]]:
    """Two trajectories for each pair, a group of their own with the rewards 1 and 0, and the pairs that the model
    cannot hold or that have no answer of the agents to train."""
    found: list[Trajectory] = []
    rejected: list[Rejection] = []
    for record in records:
        pair = [_trajectory(record, name, tokenizer) for name in ("chosen", "rejected")]
        calls = [call for each in pair for call in each.transitions]
        if (too_long := tokenizer.too_long(record.where, calls)) is not None:
            rejected.append(too_long)
        elif not any(is_target(call.agent, tokenizer.target) for call in calls):
            rejected.append(Rejection(record.where, NO_TARGET_CALLS, f"no answer is of an agent {tokenizer.target!r}"))
        else:
            found += pair
    return found, rejected


def _trajectory(record: PreferenceRecord, name: str, tokenizer: Tokenizer) -> Trajectory:
    answer = record.chosen if name == "chosen" else record.rejected
    rollout_id = f"{record.where} {name}"
    calls = tokenizer.answers([*record.prompt, *answer], list(record.tools) or None, f"{record.where}: {name}")
    own = tuple(renamed(call, rollout_id) for call in calls if call.sequence_id > len(record.prompt))
    return Trajectory(rollout_id, "", own, PREFERRED if name == "chosen" else 0.0, group=record.where)
