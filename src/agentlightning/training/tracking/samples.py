"""Sample rollouts of a validation as transcripts: those of its first tasks, the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.sources.group_rewards import transcript_of
from agentlightning.training.tracking.base import Transcript

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
    text = value if isinstance(value, str) else orjson.dumps(value, default=repr).decode()
    return text[:MOST_TEXT]


def said(message: Mapping[str, Any]) -> str:
    """What a message says: its texts, and other parts as JSON."""
    parts = [part for part in message.get("parts") or () if isinstance(part, Mapping)]
    return " ".join(
        str(part["content"]) if "content" in part else text_of({k: v for k, v in part.items() if k != "type"})
        for part in parts
    )
