"""Counts calls, and makes their spans, whoever answers them: an engine of ours, a provider, or nobody.

Requests are read as they come, of any dialect: what is not known of one stays as it is, and nothing is rejected. They
and their answers are shown as OpenTelemetry has them. Calls that were rejected before an engine or a provider was
called are recorded here, so that a rollout shows why it failed; those without an attempt, or with one that does not
exist, cannot be.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from agentlightning import span as names
from agentlightning.attempt_address import attempt_trace_id
from agentlightning.errors import StoreError
from agentlightning.gateway.answer import MALFORMED, Answer, HostedCall, ReasoningDelta, RefusalDelta, ToolCall, objects
from agentlightning.gateway.callers import Caller
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import ApiPath, Constraint, read_json
from agentlightning.gateway.errors import ApiError, to_api_error
from agentlightning.gateway.http import offload
from agentlightning.span import Span, new_span_id
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.messages import message_part, tool_call, tool_call_part, tool_response_part
from agentlightning.util.json_values import Json, dumps

logger = logging.getLogger(__name__)

MAX_RECORDED_BYTES: Final = 256 * 1024
"""Above this size, the messages of a rejected request are not recorded."""

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
            trace_id=caller.trace_id or self.trace_id or attempt_trace_id(caller.attempt_id or ""),
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
    kind = error.code or error.type if isinstance(error, ApiError) else type(error).__qualname__
    return kind, str(error)


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
                parts.append(tool_call_part(part.id or None, part.name, part.arguments))
            case HostedCall():
                parts.append(shown_part(part.block))
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
    request: Json = {}
    with suppress(ApiError):  # It may have been rejected for its JSON.
        request = await offload(len(body), partial(read_json, body))
    name, model = DIALECTS[path].operation, request.get("model")
    attributes: Json = {names.OPERATION_NAME: name}
    if isinstance(model, str):
        name, attributes[names.REQUEST_MODEL] = f"{name} {model}", model
    if len(body) <= MAX_RECORDED_BYTES:
        with suppress(*MALFORMED):  # It may have been rejected for its messages.
            attributes[names.INPUT_MESSAGES] = input_messages(request)
    record = CallRecord(name, caller, started=started)
    try:
        await store.add_span(record.span(attributes, failure_of(api_error)))
    except StoreError as failure:
        logger.warning("a rejected call could not be recorded: %s", failure)


# -- what a request asks for -------------------------------------------------------------------------------------------


LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields with the limit of output tokens."""
_PARAMS: Final = (
    (names.REQUEST_TEMPERATURE, ("temperature",), (int, float)),
    (names.REQUEST_TOP_P, ("top_p",), (int, float)),
    (names.REQUEST_TOP_K, ("top_k",), (int,)),
    (names.REQUEST_MAX_TOKENS, LIMITS, (int,)),
    (names.REQUEST_SEED, ("seed",), (int,)),
)

_DISTRIBUTION_FIELDS: Final = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens"), (0,)),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "structured_outputs"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Fields that change the sampling distribution beyond temperature, top_p and top_k -> the values with which they do
not."""


def distribution_changes(data: Json) -> list[str]:
    """The fields of a request that change the distribution in a way that no loss can correct for."""
    return [
        name
        for name, neutral in _DISTRIBUTION_FIELDS.items()
        if data.get(name) is not None and data[name] not in neutral
    ]


def request_attributes(data: Json) -> Json:
    """The sampling parameters of a request, and the tools it offers."""
    found: Json = {}
    for name, keys, kinds in _PARAMS:
        given = [value for key in keys if isinstance(value := data.get(key), kinds) and not isinstance(value, bool)]
        found |= {name: given[0]} if given else {}
    stop = data.get("stop", data.get("stop_sequences"))
    if stops := [stop] if isinstance(stop, str) else stop if isinstance(stop, list | tuple) else []:
        found[names.REQUEST_STOP] = [text for text in stops if isinstance(text, str)]
    if tools := data.get("tools"):
        found[names.TOOL_DEFINITIONS] = as_json(tools)
    return found


def input_messages(data: Json, index: int = 0) -> str:
    """The messages of a request as JSON; of several raw prompts, the one at `index`."""
    instructions, given = data.get("system") or data.get("instructions"), data.get("messages", data.get("input"))
    if given is None:
        prompts = _texts(data.get("prompt"))
        given = prompts[index : index + 1] or prompts[:1]
    turns = [{"role": "system", "content": instructions}] if instructions else []
    return as_json([shown_message(each) for each in [*turns, *_texts(given)]])


def as_json(value: Any) -> str:
    """JSON for a span. Requests may be nested as deeply as orjson can write, and their messages are nested a little
    deeper."""
    try:
        return dumps(value).decode()
    except TypeError:
        with suppress(RecursionError):
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return "[]"


def num_sampled(request: Json) -> int:
    """The number of choices that a provider samples in all, and charges for."""
    best, each = request.get("best_of"), num_choices(request)
    return (max(each, best) if isinstance(best, int) else each) * max(1, len(_texts(request.get("prompt"))))


def num_choices(request: Json) -> int:
    """How many answers a request asks for to each of its prompts."""
    several = request.get("n")
    return max(1, several) if isinstance(several, int) else 1


def _texts(value: Any) -> Sequence[Any]:
    """A text, or a list of tokens, as the only one of a list; a list of texts, messages or items as it is."""
    if not isinstance(value, list):
        return [value] if isinstance(value, str) else []
    items = cast("list[Any]", value)
    return [items] if items and isinstance(items[0], int) else items


def shown_message(given: Any) -> Json:
    """A message or an item of any dialect, or a text of the user."""
    if not isinstance(given, dict):
        given = {"role": "user", "content": given if isinstance(given, str) else dumps(given).decode()}
    message = cast("Json", given)
    if "role" not in message:
        part = shown_part(message)
        return {"role": "tool" if part["type"] == "tool_call_response" else "assistant", "parts": [part]}
    role, content = message["role"], message.get("content")
    if role == "tool":
        return {"role": role, "parts": [tool_response_part(message.get("tool_call_id"), content)]}
    if isinstance(content, str):
        parts: list[Json] = [{"type": "text", "content": content}] if content else []
    else:
        parts = [shown_part(part) for part in objects(content)]
    if thought := message.get("reasoning_content"):
        parts.insert(0, {"type": "reasoning", "content": thought})
    if calls := message.get("tool_calls"):
        parts += map(tool_call, objects(calls))
    shown: Json = {"role": "system" if role == "developer" else role, "parts": parts}
    return shown | {"name": message["name"]} if "name" in message else shown


def shown_part(part: Json) -> Json:
    """A part, block or item of any dialect. One of an unknown type, such as a call of a hosted tool, stays as it is."""
    kind = part.get("type") or "generic"
    known = not str(kind).startswith("mcp_") and message_part(part)  # one of MCP has more than a part keeps
    return known or {**part, "type": kind}
