"""Executes calls that carry an idempotency key: a repeated call gets the result of the first and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.idempotency import AlreadyAnsweredError, IdempotentCall, use_key

_READ_CURRENT: Final[Mapping[str, tuple[str, str]]] = {
    "add_resources": ("get_resources_by_id", "resources_id"),
    "cancel_rollout": ("get_rollout_by_id", "rollout_id"),
    "requeue_rollout": ("get_rollout_by_id", "rollout_id"),
    "update_attempt": ("get_attempt", "attempt_id"),
    "update_resources": ("get_resources_by_id", "resources_id"),
    "update_rollout": ("get_rollout_by_id", "rollout_id"),
}
"""What to return instead of a result that was too long to store: the method to read it with, and its argument."""


async def call_once(store: LightningStoreBase, method: str, arguments: dict[str, Any], call: IdempotentCall) -> bytes:
    """The encoded result of `call`, a call of `method`. Raises what the method raises, and ConflictError if the key was
    used with other arguments."""
    try:
        with use_key(call):
            return call.encode(await getattr(store, method)(**arguments))
    except AlreadyAnsweredError as before:
        if before.answer is not None:
            return before.answer
    reader, name = _READ_CURRENT.get(method, ("", ""))
    current = await getattr(store, reader)(arguments[name]) if isinstance(arguments.get(name), str) else None
    if current is None:
        raise ConflictError(
            f"{method} was already executed with this idempotency key; its result was too long to be stored"
        )
    return call.encode(current)


def claim_id_of(key: str) -> str:
    """The claim id for an idempotency key, so that a repeated claim gets the same rollouts."""
    return f"cl-{blake2b(key.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"
