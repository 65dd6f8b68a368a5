"""What a user with the token may change: cancel, requeue, retry and annotate rollouts.

Each names rollouts by their ids, and answers for each what became of it: one that cannot be changed does not stop the
others.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.run_data import RunData
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.recording.feedback import Feedback, add_feedback
from agentlightning.util.json_values import Json

MOST_IDS: Final = 1000
RETRY_OF: Final = "retry_of"
"""In the metadata of a rollout: the one whose task is run again."""
SOURCE: Final = "dashboard"
"""Who gave feedback, where the user did not say."""
ONLY_READS: Final = "this dashboard only reads; open that of the server, with its access token"
Action = Callable[[RunData, str, Mapping[str, Any]], Awaitable[Json]]


async def act(data: Catalog, name: str, action: str, body: Any) -> Json:
    """Do something to each rollout of `body["rollout_ids"]`. Raises ConfigError for a request that cannot be."""
    if not data.writable:
        raise ConfigError(ONLY_READS)
    if action not in ACTIONS:
        raise ConfigError(f"action {action!r} is none of: {', '.join(ACTIONS)}")
    ids = ids_in(body)
    run = await data.run(name)
    results: Json = {}
    for rollout_id in ids:
        try:
            results[rollout_id] = {"done": True, **await ACTIONS[action](run, rollout_id, body)}
        except AgentLightningError as error:
            results[rollout_id] = {"done": False, "error": str(error)}
    await run.summaries.of(await run.by_ids(ids), fresh=True)
    return {"action": action, "results": results, "done": sum(each["done"] for each in results.values())}


def ids_in(body: Any) -> list[str]:
    """The rollouts that a request names. Raises ConfigError."""
    ids: Any = body.get("rollout_ids") if isinstance(body, dict) else None
    if not isinstance(ids, list) or not ids or not all(isinstance(each, str) for each in ids):
        raise ConfigError('the request names no rollouts; send {"rollout_ids": ["..."]}')
    if len(ids) > MOST_IDS:
        raise ConfigError(f"the request names {len(ids)} rollouts; at most {MOST_IDS} are changed at once")
    return list(dict.fromkeys(ids))


async def _cancel(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    return {"status": (await run.store.cancel_rollout(rollout_id)).status}


async def _requeue(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """The same rollout waits again; a succeeded one cannot."""
    return {"status": (await run.store.requeue_rollout(rollout_id, "requeued from the dashboard")).status}


async def _retry(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """A new rollout of the same task, which leaves this one as it is."""
    rollout = await run.rollout(rollout_id)
    new = await run.store.enqueue_rollout(
        rollout.input,
        rollout.mode,
        rollout.resources_id,
        rollout.config,
        {RETRY_OF: rollout_id},
        f"ro-{uuid.uuid4().hex[:20]}",
        queue=rollout.queue,
        priority=rollout.priority,
    )
    return {"status": new.status, "rollout_id": new.rollout_id}


async def _annotate(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """Feedback as a span: a score becomes the final reward of the rollout, a label can be filtered by."""
    given = {name: body[name] for name in ("score", "label", "comment") if body.get(name) not in (None, "")}
    source = body.get("source") or SOURCE
    if not isinstance(source, str):
        raise ConfigError(f"source={source!r:.80} is not text")
    span = await add_feedback(run.store, rollout_id, Feedback(**given), source)
    return {"span_id": span.span_id}


ACTIONS: Final[Mapping[str, Action]] = {
    "cancel": _cancel,
    "requeue": _requeue,
    "retry": _retry,
    "annotate": _annotate,
}
