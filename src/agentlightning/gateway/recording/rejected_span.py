"""Records calls that were rejected before an engine or a provider was called, so that a rollout shows why it failed.

Calls without an attempt, or with one that does not exist, cannot be recorded.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial
from typing import Final

from agentlightning import span as names
from agentlightning.attempt_address import trace_id_of
from agentlightning.errors import StoreError
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.errors import to_api_error
from agentlightning.gateway.json_body import parse_object
from agentlightning.gateway.offload import offload
from agentlightning.gateway.recording.otel_messages import OPERATIONS, input_messages
from agentlightning.gateway.upstream.provider import ApiPath
from agentlightning.span import Span, new_span_id, new_trace_id
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

MAX_RECORDED_BYTES: Final = 256 * 1024
"""Above this size, the messages of a rejected request are not recorded."""

_NO_ATTEMPT: Final = frozenset({"rollout_not_found", "attempt_not_found", "store_unavailable", "store_error"})


async def record_rejection(
    store: LightningStoreBase, path: ApiPath, caller: Caller, body: bytes, error: Exception, started: float
) -> None:
    """Record a rejected call if it has an attempt. Failures of the store are only logged: the caller has an error
    already."""
    api_error = to_api_error(error)
    if caller.attempt is None or api_error.code in _NO_ATTEMPT:
        return
    rollout_id, attempt_id = caller.attempt
    request = await offload(len(body), partial(parse_object, body)) or {}
    model = request.get("model")
    attributes = {
        names.OPERATION_NAME: OPERATIONS[path],
        names.ERROR_TYPE: api_error.code or api_error.type,
        **({names.REQUEST_MODEL: model} if isinstance(model, str) else {}),
        **caller.attributes(),
    }
    if len(body) <= MAX_RECORDED_BYTES:
        with suppress(
            AttributeError, KeyError, TypeError, ValueError, IndexError
        ):  # It may have been rejected for its messages.
            attributes[names.INPUT_MESSAGES] = input_messages(path, request)
    span = Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        name=f"{OPERATIONS[path]} {model}" if isinstance(model, str) else OPERATIONS[path],
        start_time=started,
        end_time=time.time(),
        trace_id=caller.trace_id or trace_id_of(attempt_id) or new_trace_id(),
        span_id=new_span_id(),
        parent_id=caller.parent_id,
        status_code="ERROR",
        status_message=api_error.message,
        attributes=attributes,
    )
    try:
        await store.add_span(span)
    except StoreError as failure:
        logger.warning("a rejected call could not be recorded: %s", failure)
