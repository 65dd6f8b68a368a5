"""Counts calls, and makes their spans, whoever answers them: an engine of ours, a provider, or nobody.

What an answer said is shown as OpenTelemetry has it. Calls that were rejected before an engine or a provider was called
are recorded here, so that a rollout shows why it failed; those without an attempt, or with one that does not exist,
cannot be.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from agentlightning import span as names
from agentlightning.attempt_address import trace_id_of
from agentlightning.errors import StoreError
from agentlightning.gateway.answer import MALFORMED, Answer, HostedCall, Json, ReasoningDelta, RefusalDelta, ToolCall
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.dialects.base import ApiPath
from agentlightning.gateway.dialects.output_constraint import Constraint
from agentlightning.gateway.dialects.raw_request import OPERATIONS, as_json, input_messages, message_part, tool_call
from agentlightning.gateway.errors import ApiError, to_api_error
from agentlightning.gateway.http import offload, parse_object
from agentlightning.span import Span, new_span_id, new_trace_id
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

MAX_RECORDED_BYTES: Final = 256 * 1024
"""Above this size, the messages of a rejected request are not recorded."""
MAX_UNKNOWN_NAMES: Final = 200
_NO_ATTEMPT: Final = frozenset({"rollout_not_found", "attempt_not_found", "store_unavailable", "store_error"})


@dataclass(slots=True)
class Counters:
    """Counts since the gateway was created."""

    requests: int = 0
    errors: int = 0
    """Requests with an error reply."""
    cancelled: int = 0
    """Requests whose client disconnected."""
    unattributed: int = 0
    """Requests without an attempt, which are not recorded."""
    continued: int = 0
    """Requests whose prompt continues the tokens of an earlier call."""
    drift: int = 0
    """Requests that looked like a continuation but could not be proven to be one."""
    tools_in_messages: int = 0
    """Requests whose tools stand in their messages, as the model's template has no place for them."""
    overridden: int = 0
    """Calls of training rollouts whose sampling parameters were overridden (`gateway.sampling`)."""
    violated: int = 0
    """Answers that violate the schema or tool choice of their request."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    unknown_fields: int = 0
    """Request fields that were ignored."""
    unknown_names: Counter[str] = field(default_factory=Counter[str])
    """Count by name, for the first names."""

    def count_unknown(self, unknown: tuple[str, ...]) -> None:
        self.unknown_fields += len(unknown)
        for name in unknown:
            if name in self.unknown_names or len(self.unknown_names) < MAX_UNKNOWN_NAMES:
                self.unknown_names[name] += 1


@dataclass(slots=True)
class CallRecord:
    """What the spans of a call share."""

    name: str
    caller: Caller
    trace_id: str = ""
    """For callers that continue no trace; "": the attempt's own, or a new one."""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def span(
        self, attributes: Json, failure: tuple[str, str | None] | None = None, *, status: str = "OK", span_id: str = ""
    ) -> Span:
        """A span that ends now. `failure`: (type, message) of the error."""
        caller = self.caller
        attributes = attributes | caller.attributes() | ({names.ERROR_TYPE: failure[0]} if failure else {})
        return Span(
            rollout_id=caller.rollout_id or "",
            attempt_id=caller.attempt_id or "",
            name=self.name,
            start_time=self.started,
            end_time=time.time(),
            trace_id=caller.trace_id or self.trace_id or trace_id_of(caller.attempt_id or "") or new_trace_id(),
            span_id=span_id or new_span_id(),
            parent_id=caller.parent_id,
            status_code="ERROR" if failure else status,
            status_message=failure and failure[1],
            attributes=attributes,
        )


def failure_of(error: BaseException) -> tuple[str, str]:
    """(type, message) of the error of a call. A cancelled one was given up by its caller, unless its attempt ended."""
    if isinstance(error, asyncio.CancelledError):
        if not (error.args and isinstance(error.args[0], ApiError)):
            return "client_disconnected", "the caller hung up before the answer was whole"
        error = error.args[0]
    return getattr(error, "code", None) or type(error).__qualname__, str(error)


def output_attributes(answer: Answer, reason: str, constraint: Constraint | None = None) -> Json:
    """What an answer said, why it ended, and whether it meets its constraint."""
    found: Json = {names.FINISH_REASONS: [reason], names.OUTPUT_MESSAGES: output_messages(answer, reason)}
    if constraint:
        found[names.CONSTRAINT], violations = constraint.evaluate(answer)
        found |= {names.VIOLATIONS: violations} if violations else {}
    return found


def output_messages(answer: Answer, reason: str) -> str:
    """An answer as messages, as JSON."""
    parts: list[Json] = []
    for part in answer.parts():
        match part:
            case ReasoningDelta():
                parts.append({"type": "reasoning", "content": part.text})
            case ToolCall():
                parts.append(tool_call(part.id or None, part.name, part.arguments))
            case HostedCall():
                parts.append(message_part(part.block))
            case str() | RefusalDelta():
                parts.append({"type": "text", "content": part if isinstance(part, str) else part.text})
            case _:
                pass
    reason = "tool_call" if reason == "tool_calls" else reason  # OpenTelemetry's is singular.
    return as_json([{"role": "assistant", "parts": parts, "finish_reason": reason}])


async def record_rejection(
    store: LightningStoreBase, path: ApiPath, caller: Caller, body: bytes, error: Exception, started: float
) -> None:
    """Record a rejected call if it has an attempt. Failures of the store are only logged: the caller has an error
    already."""
    api_error = to_api_error(error)
    if caller.attempt is None or api_error.code in _NO_ATTEMPT:
        return
    request = await offload(len(body), partial(parse_object, body)) or {}
    name, model = OPERATIONS[path], request.get("model")
    attributes: dict[str, Any] = {names.OPERATION_NAME: name}
    if isinstance(model, str):
        name, attributes[names.REQUEST_MODEL] = f"{name} {model}", model
    if len(body) <= MAX_RECORDED_BYTES:
        with suppress(*MALFORMED):  # It may have been rejected for its messages.
            attributes[names.INPUT_MESSAGES] = input_messages(path, request)
    record = CallRecord(name, caller, started=started)
    try:
        await store.add_span(record.span(attributes, (api_error.code or api_error.type, api_error.message)))
    except StoreError as failure:
        logger.warning("a rejected call could not be recorded: %s", failure)
