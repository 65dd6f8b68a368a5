"""Reads what providers answer to `/v1/responses`, whole or event by event."""

from __future__ import annotations

from typing import Any, Final

from agentlightning.gateway.dialects.provider_events import (
    FINISH_REASONS,
    BlockDone,
    Emit,
    Finish,
    Json,
    ProviderFailure,
    ReasoningDelta,
    RefusalDelta,
    ResponseStart,
    SampledTokens,
    TextDelta,
    ToolCallDone,
    ToolCallFragment,
    Usage,
    UsageReport,
    counted,
    logprob_entries,
)

LAST_EVENTS: Final = ("response.completed", "response.incomplete", "response.failed")
"""Types of the events that end a stream; each repeats the whole response."""


class ResponsesEvents:
    """Reader of one answer. Items that were streamed are not read again where the last event repeats them."""

    def __init__(self, with_blocks: bool = False) -> None:
        self._with_blocks = with_blocks
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
        if item.get("type") == "function_call":
            self._started.add(place)
            emit(ToolCallFragment(place, item.get("call_id"), item.get("name"), item.get("arguments")))

    def _response(self, response: Json, whole: bool, emit: Emit) -> None:
        emit(ResponseStart(response.get("id"), response.get("model")))
        if not whole:
            return
        if usage := response.get("usage"):
            emit(_report(usage))
        items = response.get("output") or ()
        for place, item in enumerate(items):
            if place not in self._streamed and item.get("id") not in self._streamed:
                self._item(place, item, emit)
        if response.get("status") == "failed":
            emit(ProviderFailure(str((response.get("error") or {}).get("message"))))
        reason = (response.get("incomplete_details") or {}).get("reason")
        if isinstance(reason, str) and reason:
            emit(Finish(FINISH_REASONS.get(reason, reason)))
        else:
            emit(Finish("tool_calls" if any(item.get("type") == "function_call" for item in items) else "stop"))

    def _item(self, place: Any, item: Json, emit: Emit) -> None:
        """A complete item, of which nothing is read twice."""
        kind = item.get("type")
        if place not in self._streamed and item.get("id") not in self._streamed:
            self._streamed.add(place)
            for part in item.get("content") or item.get("summary") or ():
                _part(kind, part, emit)
            if kind == "function_call":
                started = place in self._started
                call_id, name = (None, None) if started else (item.get("call_id"), item.get("name"))
                emit(ToolCallFragment(place, call_id, name, item.get("arguments")))
        if kind == "function_call":
            emit(ToolCallDone(place))
        if self._with_blocks:
            emit(BlockDone(item))


def responses_usage(usage: Json) -> Usage:
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
    return counted(usage.get("input_tokens"), usage.get("output_tokens"), cached)


def _report(usage: Json) -> UsageReport:
    prompt, output = usage.get("input_tokens_details") or {}, usage.get("output_tokens_details") or {}
    details = prompt.get("cached_tokens"), prompt.get("cache_write_tokens"), output.get("reasoning_tokens")
    return UsageReport(responses_usage(usage), *details)


def _delta(kind: str, place: Any, data: Json, emit: Emit) -> None:
    text = data["delta"]
    match kind:
        case "response.output_text.delta":
            _text(text, data.get("logprobs"), emit)
        case "response.refusal.delta":
            if isinstance(text, str) and text:
                emit(RefusalDelta(text))
        case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
            if isinstance(text, str) and text:
                emit(ReasoningDelta(text))
        case "response.function_call_arguments.delta":
            emit(ToolCallFragment(place, None, None, text))
        case _:
            pass


def _part(kind: Any, part: Json, emit: Emit) -> None:
    """A part of the content of a whole item."""
    text, refusal = part.get("text"), part.get("refusal")
    if kind == "reasoning":
        if isinstance(text, str) and text:
            emit(ReasoningDelta(text))
        return
    _text(text, part.get("logprobs"), emit)
    if isinstance(refusal, str) and refusal:
        emit(RefusalDelta(refusal))


def _text(text: Any, logprobs: Any, emit: Emit) -> None:
    if entries := logprob_entries(logprobs):
        emit(SampledTokens(entries=entries))
    if isinstance(text, str) and text:
        emit(TextDelta(text))
