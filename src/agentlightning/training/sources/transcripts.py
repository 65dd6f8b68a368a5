"""What a rollout said, as text: the messages of its last model call, and its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.rollouts import Attempt
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.util.json_values import dumps, recorded_objects

MOST_TEXT: Final = 2000
"""Characters of a task, a conversation or an output."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What the last attempt of a rollout has left in the store."""

    attempt: Attempt | None
    spans: tuple[Span, ...]

    @property
    def output(self) -> Any:
        """What the agent returned."""
        return None if self.attempt is None else self.attempt.metadata.get("output")


async def read_recordings(store: LightningStoreBase, rollout_ids: Sequence[str]) -> dict[str, Recording]:
    """By rollout id, in the order given. Raises NotFoundError for a rollout that is no longer there."""
    if not rollout_ids:
        return {}
    attempts = {each.rollout_id: each for each in await store.get_latest_attempts(rollout_ids)}
    spans = {rollout_id: tuple(found) async for rollout_id, found in store.iter_spans(rollout_ids)}
    return {each: Recording(attempts.get(each), spans.get(each, ())) for each in rollout_ids}


def conversation_of(spans: Sequence[Span]) -> list[str]:
    """The transcript, a line for each message."""
    return [f"{each.get('role', '?')}: {said(each)}" for each in transcript_of(spans)]


def transcript_of(spans: Sequence[Span]) -> tuple[Mapping[str, Any], ...]:
    """The messages of the last model call and its answer; empty where there is none."""
    made = calls(spans)
    recorded = [made[-1].attributes.get(name) for name in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES)] if made else []
    return tuple(message for each in recorded for message in recorded_objects(each))


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
