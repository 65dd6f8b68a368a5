"""Answering a call that has an idempotency key: it is done, or was, and is answered all the same."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.idempotency import AlreadyAnsweredError, IdempotentCall, making

_READ_AGAIN: Final[Mapping[str, tuple[str, str]]] = {
    "add_resources": ("get_resources_by_id", "resources_id"),
    "cancel_rollout": ("get_rollout_by_id", "rollout_id"),
    "requeue_rollout": ("get_rollout_by_id", "rollout_id"),
    "update_attempt": ("get_attempt", "attempt_id"),
    "update_resources": ("get_resources_by_id", "resources_id"),
    "update_rollout": ("get_rollout_by_id", "rollout_id"),
}
"""What to read where the answer was too long to be remembered, and the argument that says of which."""


async def do_once(
    store: LightningStoreBase,
    method: str,
    arguments: dict[str, Any],
    call: IdempotentCall,
) -> bytes:
    """The answer of the call, which is one of `method`. Raises what the method does, and ConflictError where the key
    was used for other arguments."""
    try:
        with making(call):
            return call.encode(await getattr(store, method)(**arguments))
    except AlreadyAnsweredError as before:
        if before.answer is not None:
            return before.answer
    reader, name = _READ_AGAIN.get(method, ("", ""))
    now = await getattr(store, reader)(arguments[name]) if isinstance(arguments.get(name), str) else None
    if now is None:
        raise ConflictError(f"{method} was done before under this idempotency key; its answer was too long to be kept")
    return call.encode(now)


def claim_id_of(key: str) -> str:
    """The claim that is made under an idempotency key: one that is repeated gets what it got."""
    return f"cl-{blake2b(key.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"
