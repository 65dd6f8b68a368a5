"""Reads what providers answer to Anthropic's `/v1/messages`, whole or event by event."""

from __future__ import annotations

from typing import Any, Final

from msgspec import structs

from agentlightning.gateway.dialects.provider_events import (
    BlockDone,
    Emit,
    Finish,
    HostedCall,
    Json,
    ProviderFailure,
    ReasoningDelta,
    ResponseStart,
    TextDelta,
    ToolCallDone,
    ToolCallFragment,
    Usage,
    UsageReport,
    counted,
    emit_text,
)
from agentlightning.gateway.dialects.sse import loads

_OWN: Final = ("text", "thinking", "redacted_thinking", "tool_use")
"""Types of the blocks that the model writes; hosted tools write the others."""


_TEXTS: Final = {"text": TextDelta, "thinking": ReasoningDelta}
"""Type of a block and its field -> the event with its text."""


class MessagesEvents:
    """Reader of one answer."""

    def __init__(self) -> None:
        self._usage = Usage()
        self._blocks: dict[Any, Json] = {}
        """Content blocks that are not complete, by their index."""
        self._deltas: dict[Any, dict[str, list[str]]] = {}
        """The deltas of each, by the field they extend: joined once, at the end of the block."""

    def read(self, data: Json, emit: Emit) -> None:
        """Emit the events of a whole answer or of one stream event."""
        place = data.get("index")
        match data.get("type"):
            case "message" | "message_start":
                message = data.get("message", data)
                emit(ResponseStart(message.get("id"), message.get("model")))
                for index, block in enumerate(message.get("content") or ()):
                    self._start(index, block, emit)
                    self._end(index, emit)
                self._finish(message, message.get("usage"), emit, whole=data.get("type") == "message")
            case "content_block_start":
                self._start(place, data["content_block"], emit)
            case "content_block_delta":
                self._delta(place, data["delta"], emit)
            case "content_block_stop":
                self._end(place, emit)
            case "message_delta":
                self._finish(data["delta"], data.get("usage"), emit)
            case "error":
                emit(ProviderFailure(str((data.get("error") or {}).get("message"))))
            case _:
                pass

    def _finish(self, message: Json, usage: Any, emit: Emit, whole: bool = False) -> None:
        reason, stop = message.get("stop_reason"), message.get("stop_sequence")
        reason = reason if isinstance(reason, str) and reason else None
        if reason or whole:
            emit(Finish(reason, stop if isinstance(stop, str) else None))
        if usage:
            self._usage = messages_usage(usage, self._usage)
            details = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
            thought = (usage.get("output_tokens_details") or {}).get("thinking_tokens")
            emit(UsageReport(self._usage, *details, thought))

    def _start(self, place: Any, block: Json, emit: Emit) -> None:
        self._blocks[place] = dict(block)
        kind = block.get("type")
        if kind in _TEXTS:
            emit_text(_TEXTS[kind], block.get(kind), emit)
        elif kind == "tool_use":
            emit(ToolCallFragment(place, block.get("id"), block.get("name"), block.get("input") or None))

    def _delta(self, place: Any, delta: Json, emit: Emit) -> None:
        kind = str(delta.get("type")).removesuffix("_delta")
        if kind in _TEXTS:
            self._extend(place, kind, delta)
            emit_text(_TEXTS[kind], delta.get(kind), emit)
        elif kind == "signature":
            self._blocks[place][kind] = delta[kind]
        elif kind == "input_json":
            self._extend(place, "partial_json", delta)
            if self._blocks[place].get("type") == "tool_use":
                emit(ToolCallFragment(place, None, None, delta["partial_json"]))

    def _extend(self, place: Any, name: str, delta: Json) -> None:
        self._deltas.setdefault(place, {}).setdefault(name, []).append(delta[name])

    def _end(self, place: Any, emit: Emit) -> None:
        block = self._blocks.pop(place)
        if block.get("type") == "tool_use":
            emit(ToolCallDone(place))
        if (whole := self._joined(place, block)) is not None:
            emit(BlockDone(whole) if block.get("type") in _OWN else HostedCall(whole))

    def _joined(self, place: Any, block: Json) -> Json | None:
        """The block with its deltas; None for a tool call that was cut off, which cannot be sent back."""
        texts = {name: "".join(deltas) for name, deltas in self._deltas.pop(place, {}).items()}
        arguments = texts.pop("partial_json", "")
        block |= {name: block.get(name, "") + text for name, text in texts.items()}
        if arguments:
            try:
                block["input"] = loads(arguments.encode())
            except ValueError:
                return None
        return block


def messages_usage(usage: Json, before: Usage = Usage()) -> Usage:  # noqa: B008 - it is frozen
    """`before`: what an earlier event of the same answer reported."""
    cached, written = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
    prompt = (usage.get("input_tokens") or 0) + cached + written
    output = usage.get("output_tokens") or before.output_tokens
    if not prompt:
        return structs.replace(before, output_tokens=counted(output).input_tokens)
    hour = (usage.get("cache_creation") or {}).get("ephemeral_1h_input_tokens") or 0
    if not hour and written == before.written_tokens + before.written_hour_tokens:  # The end reports less detail.
        hour = before.written_hour_tokens
    return counted(prompt, output, cached or before.cached_tokens, written - hour, hour)
