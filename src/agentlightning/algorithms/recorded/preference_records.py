"""Preference pairs from records: `{"prompt": ..., "chosen": ..., "rejected": ...}`, as TRL reads and `agl export --to
dpo-jsonl` writes them.

Each part is a list of messages in OpenAI's form, or a text, which is one message: the user's in the prompt, the
assistant's in an answer. Without a prompt, what both conversations begin with is the prompt. `tools` may be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from agentlightning.algorithms.recorded.conversations import AnswerRenderer, too_long
from agentlightning.algorithms.recorded.sessions import NO_TARGET_CALLS
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.messages import read_message, read_tools
from agentlightning.credit import is_target
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import DatasetError
from agentlightning.task import json_lines, load_dataset
from agentlightning.trajectory import Trajectory, Transition

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


def conversations(records: Sequence[PreferenceRecord]) -> list[dict[str, Any]]:
    """Both answers of each pair as conversations."""
    return [
        {"messages": [*record.prompt, *answer], "tools": list(record.tools)}
        for record in records
        for answer in (record.chosen, record.rejected)
    ]


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
    records: Sequence[PreferenceRecord],
    chat: ChatFormat,
    context_length: int,
    target: str | None,
    counts: Counter[str] | None = None,
) -> tuple[list[Trajectory], list[Rejection]]:
    """Two trajectories for each pair, a group of their own with the rewards 1 and 0, and the pairs that the model
    cannot hold or that have no answer of the agents to train. `counts` gets what deviates from the chat template
    (`conversations.NOTES`)."""
    renderer = AnswerRenderer(chat, Counter() if counts is None else counts)
    found: list[Trajectory] = []
    rejected: list[Rejection] = []
    for record in records:
        pair = [_trajectory(record, name, renderer) for name in ("chosen", "rejected")]
        calls = [call for each in pair for call in each.transitions]
        longest = max(len(call.prompt_token_ids) + len(call.response_token_ids) for call in calls)
        if longest > context_length:
            rejected.append(too_long(record.where, longest, context_length))
        elif not any(is_target(call.agent, target) for call in calls):
            rejected.append(Rejection(record.where, NO_TARGET_CALLS, f"no answer is of an agent {target!r}"))
        else:
            found += pair
    return found, rejected


def _trajectory(record: PreferenceRecord, name: str, renderer: AnswerRenderer) -> Trajectory:
    answer = record.chosen if name == "chosen" else record.rejected
    rollout_id = f"{record.where} {name}"
    messages = [*record.prompt, *answer]
    calls = renderer.transitions(messages, list(record.tools) or None, f"{record.where}: {name}")
    own = tuple(_named(call, rollout_id) for call in calls if call.sequence_id > len(record.prompt))
    return Trajectory(rollout_id, "", own, PREFERRED if name == "chosen" else 0.0, group=record.where)


def _named(call: Transition, rollout_id: str) -> Transition:
    logprobs = (0.0,) * len(call.response_token_ids)
    return replace(call, rollout_id=rollout_id, span_id=f"{rollout_id}/{call.sequence_id}", logprobs=logprobs)
