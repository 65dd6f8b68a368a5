"""Sample rollouts of a validation as transcripts: those of its first tasks, the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.sources.group_rewards import transcript_of
from agentlightning.training.tracking.trackers import Transcript
from agentlightning.util.json_values import dumps

MOST_TEXT = 2000
"""Characters of a task, a conversation or an output."""


async def validation_transcripts(
    store: LightningStoreBase, names: Mapping[str, str], results: Mapping[str, Evaluation], tasks: list[Any]
) -> list[Transcript]:
    """One for each of `tasks` in each mode. `names`: by mode, the beginning of the ids of its rollouts."""
    wanted = [(mode, index, f"{name}-{index:05d}") for mode, name in names.items() for index in range(len(tasks))]
    ids = [rollout_id for _, _, rollout_id in wanted]
    attempts = {each.rollout_id: each for each in await store.get_latest_attempts(ids)} if ids else {}
    spans = {rollout_id: found async for rollout_id, found in store.iter_spans(ids)} if ids else {}
    return [
        Transcript(
            mode,
            text_of(tasks[index]),
            "\n".join(f"{each.get('role', '?')}: {said(each)}" for each in transcript_of(spans.get(rollout_id, [])))[
                -MOST_TEXT:
            ],
            text_of(attempts[rollout_id].metadata.get("output")) if rollout_id in attempts else "",
            results[mode].rewards[index],
            rollout_id,
        )
        for mode, index, rollout_id in wanted
    ]


def text_of(value: Any) -> str:
    """A task or an output as text."""
    return (value if isinstance(value, str) else _json(value))[:MOST_TEXT]


def _json(value: Any) -> str:
    return dumps(value, default=repr).decode()


def said(message: Mapping[str, Any], between: str = " ") -> str:
    """What a message says: its texts, tool calls as `name(argument=value)` and their results, other parts as JSON."""
    return between.join(_part(part) for part in message.get("parts") or () if isinstance(part, Mapping))


def _part(part: Mapping[str, Any]) -> str:
    if part.get("type") == "tool_call":
        given = part.get("arguments")
        if isinstance(given, Mapping):
            given = ", ".join(f"{name}={_json(value)}" for name, value in cast("Mapping[str, Any]", given).items())
        return f"{part.get('name')}({'' if given is None else text_of(given)})"
    if part.get("type") == "tool_call_response":
        return text_of(part.get("response"))
    if "content" in part:
        return str(part["content"])
    return text_of({name: value for name, value in part.items() if name != "type"})
