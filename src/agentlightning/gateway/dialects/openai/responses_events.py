"""Reads what providers answer to `/v1/responses`, whole or event by event."""

from __future__ import annotations

from typing import Any, Final

from agentlightning.gateway.dialects.openai.chat_events import usage_report
from agentlightning.gateway.dialects.provider_events import (
    BlockDone,
    Emit,
    Finish,
    HostedCall,
    Json,
    ProviderFailure,
    ReasoningDelta,
    RefusalDelta,
    ResponseStart,
    SampledTokens,
    TextDelta,
    ToolCallDone,
    ToolCallFragment,
    emit_text,
    logprob_entries,
)

LAST_EVENTS: Final = ("response.completed", "response.incomplete", "response.failed")
"""Types of the events that end a stream; each repeats the whole response."""


_CALLS: Final = ("function_call", "custom_tool_call")
_OWN: Final = (*_CALLS, "message", "reasoning")
"""Types of the items that the model writes; hosted tools write the others."""


class ResponsesEvents:
    """Reader of one answer. Items that were streamed are not read again where the last event repeats them."""

    def __init__(self) -> None:
        self._streamed: set[Any] = set()
        """Output indexes of the items that were read, and ids of those that came in deltas."""
        self._started: set[Any] = set()
        """Output indexes of the tool calls whose names came before their arguments."""

    def read(self, data: Json, emit: Emit) -> None:
        """Emit the events of a whole answer or of one stream event."""
        kind, place = data.get("type"), data.get("output_index")
        if kind == "error":
            emit(ProviderFailure(str(data.get("message"))))
        elif kind == "response.output_item.done":
            self._item(place, data["item"], emit)
        elif kind == "response.output_item.added":
            self._start_call(place, data["item"], emit)
        elif kind == "response.reasoning_summary_part.added":
            if data.get("summary_index"):
                emit(ReasoningDelta("\n\n"))
        elif isinstance(kind, str) and kind.endswith(".delta"):
            self._streamed |= {place, data["item_id"]} if data.get("item_id") else {place}
            _delta(kind, place, data, emit)
        else:
            response = data.get("response", data if data.get("object") == "response" else None)
            if response is not None:
                self._response(response, kind is None or kind in LAST_EVENTS, emit)

    def _start_call(self, place: Any, item: Json, emit: Emit) -> None:
        if item.get("type") in _CALLS:
            self._started.add(place)
            emit(_fragment(place, item))

    def _response(self, response: Json, whole: bool, emit: Emit) -> None:
        emit(ResponseStart(response.get("id"), response.get("model")))
        if not whole:
            return
        if usage := response.get("usage"):
            emit(usage_report(usage))
        items = response.get("output") or ()
        for place, item in enumerate(items):
            if place not in self._streamed and item.get("id") not in self._streamed:
                self._item(place, item, emit)
        status = response.get("status") or "completed"
        if status == "failed":
            emit(ProviderFailure(str((response.get("error") or {}).get("message"))))
        reason = (response.get("incomplete_details") or {}).get("reason") or status
        called = reason == "completed" and any(item.get("type") in _CALLS for item in items)
        emit(Finish("tool_calls" if called else str(reason)))

    def _item(self, place: Any, item: Json, emit: Emit) -> None:
        """A complete item, of which nothing is read twice."""
        kind = item.get("type")
        if place not in self._streamed and item.get("id") not in self._streamed:
            self._streamed.add(place)
            for part in item.get("content") or item.get("summary") or ():
                _part(kind, part, emit)
            if kind in _CALLS:
                emit(_fragment(place, item | {"call_id": None, "name": None} if place in self._started else item))
        if kind in _CALLS:
            emit(ToolCallDone(place))
        emit(BlockDone(item) if kind in _OWN else HostedCall(item))


def _fragment(place: Any, item: Json) -> ToolCallFragment:
    is_custom = item["type"] == "custom_tool_call"
    arguments = item.get("input" if is_custom else "arguments")
    return ToolCallFragment(place, item.get("call_id"), item.get("name"), arguments, is_custom=is_custom)


_DELTAS: Final = {
    "response.refusal.delta": RefusalDelta,
    "response.reasoning_text.delta": ReasoningDelta,
    "response.reasoning_summary_text.delta": ReasoningDelta,
}
_ARGUMENTS: Final = ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta")


def _delta(kind: str, place: Any, data: Json, emit: Emit) -> None:
    if kind == "response.output_text.delta":
        _text(data["delta"], data.get("logprobs"), emit)
    elif kind in _DELTAS:
        emit_text(_DELTAS[kind], data["delta"], emit)
    elif kind in _ARGUMENTS:
        emit(ToolCallFragment(place, None, None, data["delta"], is_custom=kind == _ARGUMENTS[1]))


def _part(kind: Any, part: Json, emit: Emit) -> None:
    """A part of the content of a whole item."""
    if kind == "reasoning":
        emit_text(ReasoningDelta, part.get("text"), emit)
    else:
        _text(part.get("text"), part.get("logprobs"), emit)
        emit_text(RefusalDelta, part.get("refusal"), emit)


def _text(text: Any, logprobs: Any, emit: Emit) -> None:
    if entries := logprob_entries(logprobs):
        emit(SampledTokens(entries=entries))
    emit_text(TextDelta, text, emit)
