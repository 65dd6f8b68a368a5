"""Writes replies of Anthropic's `/v1/messages`: whole, as stream events, and as errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from agentlightning.gateway.dialects.anthropic.partial_json import JsonObjectStream
from agentlightning.gateway.dialects.anthropic.signed_reasoning import (
    THOUGHTS,
    decode_signed_reasoning,
    encode_signed_reasoning,
)
from agentlightning.gateway.dialects.base import ReplyMetadata, num_output_tokens
from agentlightning.gateway.dialects.output import (
    AnswerView,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    SignedReasoning,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from agentlightning.gateway.dialects.sse import encode_event
from agentlightning.gateway.errors import ApiError
from agentlightning.util.json_values import dumps, loads

RAW_ARGUMENTS: Final = "_raw_arguments"
"""The field for the arguments of a tool call that are no JSON object, which this format cannot carry otherwise."""


@dataclass(slots=True)
class MessagesReplyWriter:
    """Writes the reply to one request; a `ReplyWriter`."""

    head: ReplyMetadata
    _index: int = field(default=-1, init=False)
    """Index of the last block that was started."""
    _open: str | None = field(default=None, init=False)
    """Type of the open block, if it takes deltas."""
    _call: ToolCallStart | None = field(default=None, init=False)
    """The tool call whose block starts with the first of its arguments."""
    _sealed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], init=False)
    """What the provider wants back and no block has carried yet."""
    _arguments: JsonObjectStream = field(default_factory=JsonObjectStream, init=False)

    def body(self, answers: Sequence[AnswerView]) -> bytes:
        (answer,) = answers
        content: list[dict[str, Any]] = []
        for part in answer.parts():
            if isinstance(part, SignedReasoning):
                _seal(content, part.block)
            elif (block := self._block(part)) is not None:
                content.append(block)
        return dumps(self._message(content) | _stop_fields(answer) | {"usage": self._usage(num_output_tokens(answers))})

    def start(self, answers: Sequence[AnswerView]) -> bytes:
        stop = {"stop_reason": None, "stop_sequence": None}
        message = self._message([]) | stop | {"usage": self._usage(0)}
        return _event("message_start", {"message": message})

    def event(self, answer: AnswerView, event: OutputEvent) -> bytes:
        match event:
            case ToolCall():
                return self._close() + self._whole_call(event)
            case ReasoningDelta():
                closed = self._close() if self._sealed else b""  # What follows is another thought.
                started = closed + self._open_block({"type": "thinking", "thinking": "", "signature": ""})
                return started + self._delta({"type": "thinking_delta", "thinking": event.text})
            case str() | RefusalDelta():
                text = event if isinstance(event, str) else event.text
                return self._open_block({"type": "text", "text": ""}) + self._delta(
                    {"type": "text_delta", "text": text}
                )
            case ToolCallStart():
                self._call, self._arguments = event, JsonObjectStream()
                return self._close()
            case ToolCallDelta():
                return self._more_arguments(self._arguments.feed(event.text))
            case ToolCallEnd():
                return self._end_call(event.call)
            case SignedReasoning():
                self._sealed.append(event.block)
                return b""

    def end(self, answers: Sequence[AnswerView]) -> bytes:
        (answer,) = answers
        used = {"delta": _stop_fields(answer), "usage": self._usage(num_output_tokens(answers))}
        return self._close() + self._hidden() + _event("message_delta", used) + _event("message_stop", {})

    def _block(self, part: OutputEvent) -> dict[str, Any] | None:
        match part:
            case ReasoningDelta():
                return {"type": "thinking", "thinking": part.text, "signature": self.head.id}
            case ToolCall():
                return _tool_use(part, _input(part))
            case str() | RefusalDelta():
                return {"type": "text", "text": part if isinstance(part, str) else part.text}
            case _:
                return None

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model}
        return head | {"content": content}

    def _usage(self, num_sampled: int) -> dict[str, Any]:
        """Here, cached tokens are not part of the input tokens."""
        head = self.head
        read, written = head.cached_tokens or 0, head.cache_write_tokens or 0
        cache = {"cache_creation_input_tokens": written, "cache_read_input_tokens": read}
        used = {"input_tokens": max(0, head.prompt_tokens - read - written), "output_tokens": num_sampled} | cache
        thought = head.reasoning_tokens
        return used if thought is None else used | {"output_tokens_details": {"thinking_tokens": thought}}

    def _whole_call(self, call: ToolCall) -> bytes:
        arguments = {"type": "input_json_delta", "partial_json": dumps(_input(call)).decode()}
        return self._begin(_tool_use(call, {})) + self._delta(arguments) + self._end()

    def _more_arguments(self, text: str) -> bytes:
        """Starts the block once the arguments are known to start as an object."""
        started = b""
        if (call := self._call) is not None:
            if not text.strip():
                return b""
            self._call, self._open = None, "tool_use"
            started = self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        return started + self._delta({"type": "input_json_delta", "partial_json": text}) if text else started

    def _end_call(self, call: ToolCall) -> bytes:
        started, self._call = self._call is None, None
        if not started:
            return self._whole_call(call)
        return self._more_arguments(self._arguments.finish(RAW_ARGUMENTS)) + self._close()

    def _begin(self, block: dict[str, Any]) -> bytes:
        hidden = self._hidden()
        self._index += 1
        return hidden + _event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _end(self) -> bytes:
        return _event("content_block_stop", {"index": self._index})

    def _open_block(self, block: dict[str, Any]) -> bytes:
        """Start a block that takes deltas, unless one of its type is open."""
        if self._open == block["type"]:
            return b""
        closed, self._open = self._close(), block["type"]
        return closed + self._begin(block)

    def _close(self) -> bytes:
        """End the open block."""
        kind, self._open = self._open, None
        if kind != "thinking":
            return self._end() if kind else b""
        return self._delta({"type": "signature_delta", "signature": self._take_signature()}) + self._end()

    def _hidden(self) -> bytes:
        """What a provider wants back and no thinking block has carried, as a block of its own."""
        if not self._sealed:
            return b""
        return self._begin({"type": "redacted_thinking", "data": self._take_signature()}) + self._end()

    def _take_signature(self) -> str:
        """Of thinking blocks: clients send unsigned ones back as text, or not at all. It carries what the provider
        wants back; without that it means nothing."""
        sealed, self._sealed = self._sealed, []
        return encode_signed_reasoning(*sealed) if sealed else self.head.id


def _seal(content: list[dict[str, Any]], block: dict[str, Any]) -> None:
    """Add what a provider wants back to the thinking block before it, or as a block of its own."""
    if not content or content[-1]["type"] not in THOUGHTS:
        content.append({"type": "redacted_thinking"})
    last = content[-1]
    name = "signature" if last["type"] == "thinking" else "data"
    last[name] = encode_signed_reasoning(*decode_signed_reasoning(last.get(name)), block)


def _stop_fields(answer: AnswerView) -> dict[str, str | None]:
    reason = answer.finish_reason
    if answer.is_refusal:
        return {"stop_reason": "refusal", "stop_sequence": None}
    if reason == "stop" and answer.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": _STOP_REASONS.get(reason), "stop_sequence": None}


_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def _tool_use(call: ToolCall, input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input}


def _input(call: ToolCall) -> Any:
    """The arguments as they were written, if they are a JSON object."""
    try:
        is_object = isinstance(loads(call.arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(call.arguments) if is_object else {RAW_ARGUMENTS: call.arguments}


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return encode_event({"type": kind, **data}, kind)


def count_reply(tokens: int) -> bytes:
    """The reply to `count_tokens`."""
    return dumps({"input_tokens": tokens})


def error_body(api_error: ApiError) -> bytes:
    """The body of an error reply."""
    return dumps({"type": "error", "error": _error(api_error)})


def error_event(api_error: ApiError) -> bytes:
    """An error in the middle of a stream, on which the official SDK raises APIStatusError."""
    return _event("error", {"error": _error(api_error)})


def _error(api_error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(api_error.status, "invalid_request_error" if api_error.status < 500 else "api_error")
    message = api_error.message
    if api_error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # Claude Code shortens the conversation on these words.
    return {"type": kind, "message": message, "details": dict(api_error.details) or None}


_ERROR_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
