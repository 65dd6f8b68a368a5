"""Reads what providers answer to chat completions, completions and embeddings, whole or chunk by chunk.

Servers of this format differ in much: content may be a list of parts, reasoning has three names, tool calls may lack an
index, the usage may stand in a choice. What a provider wants back with a turn, reasoning and signatures, is collected
as it was written (`ECHOED`).
"""

from __future__ import annotations

from typing import Any, Final, cast

from agentlightning.gateway.dialects.anthropic.signed_reasoning import CHAT_TURN
from agentlightning.gateway.dialects.content_parts import object_of
from agentlightning.gateway.dialects.provider_events import (
    BlockDone,
    Emit,
    Finish,
    Json,
    ProviderEvent,
    ProviderFailure,
    ReasoningDelta,
    RefusalDelta,
    ResponseStart,
    SampledTokens,
    TextDelta,
    ToolCallFragment,
    Usage,
    UsageReport,
    counted,
    emit_text,
    logprob_entries,
)

ECHOED: Final = ("reasoning_content", "reasoning", "reasoning_details", "extra_content")
"""Fields of an assistant's message that its provider wants back unchanged (DeepSeek, Kimi, OpenRouter, Gemini)."""


class ChatEvents:
    """Reader of one answer."""

    def __init__(self) -> None:
        self._identified = False
        self._echoed: dict[int, dict[str, list[Any]]] = {}
        """By choice, the values of each of `ECHOED` that came since the last of its blocks."""

    def read(self, data: Json, emit: Emit) -> None:
        """Emit the events of a whole answer or of one chunk."""
        if not self._identified:  # Each chunk names both.
            self._identified = bool(data.get("id") and data.get("model"))
            emit(ResponseStart(data.get("id"), data.get("model")))
        if prompt := data.get("prompt_token_ids"):
            emit(SampledTokens(None, prompt))
        if error := data.get("error"):
            emit(ProviderFailure(error.get("message") if isinstance(error, dict) else str(error)))
        for place, choice in enumerate(data.get("choices") or ()):
            self._choice(place, choice, emit)
        if usage := data.get("usage") or object_of(data, "x_groq").get("usage"):
            emit(usage_report(usage))

    def _choice(self, place: int, choice: Json, emit: Emit) -> None:
        given, whole = choice.get("index"), choice.get("message")
        index = given if isinstance(given, int) and given >= 0 else place
        if tokens := _tokens(choice, index):
            emit(tokens)
        message, reason = whole or choice.get("delta"), choice.get("finish_reason")
        if message is not None:
            self._message(message, index, bool(whole), emit)
        else:
            emit_text(TextDelta, choice.get("text"), emit, index)
        if reason or whole or message is None:
            self._end_reasoning(index, emit)
            emit(Finish(reason if isinstance(reason, str) and reason else None, _stop_string(choice), index))
        if usage := choice.get("usage"):
            emit(usage_report(usage))

    def _message(self, message: Json, index: int, whole: bool, emit: Emit) -> None:
        for name in ECHOED:
            if value := message.get(name):
                self._echoed.setdefault(index, {}).setdefault(name, []).append(value)
        thoughts = [message.get("reasoning_content") or message.get("reasoning")]
        if not isinstance(thoughts[0], str):
            thoughts = [each.get("text") or each.get("summary") for each in message.get("reasoning_details") or ()]
        for thought in thoughts:
            emit_text(ReasoningDelta, thought, emit, index)
        texts = list[ProviderEvent]()
        _content(message.get("content"), texts.append, index)
        calls = message.get("tool_calls") or ()
        if legacy := message.get("function_call"):
            calls = [*calls, {"function": legacy}]
        refusal = message.get("refusal")
        if calls or refusal or any(isinstance(text, TextDelta) for text in texts):
            self._end_reasoning(index, emit)
        for text in texts:
            emit(text)
        emit_text(RefusalDelta, refusal, emit, index)
        for place, call in enumerate(calls):
            emit(_fragment(place, call, index, whole))

    def _end_reasoning(self, index: int, emit: Emit) -> None:
        if echoed := self._echoed.pop(index, None):
            message = {name: _joined(values) for name, values in echoed.items()}
            emit(BlockDone({"type": CHAT_TURN, "message": message}, index))


def chat_usage(usage: Json) -> Usage:
    """Of chat completions, or with the names of responses."""
    prompt, output = (usage.get(_USED[name]) or usage.get(name) for name in _USED)
    return counted(prompt, output, _details(usage, "input").get("cached_tokens") or usage.get("cached_tokens") or 0)


_USED: Final = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}


def _details(usage: Json, side: str) -> Json:
    return usage.get(f"{_USED[f'{side}_tokens']}_details") or usage.get(f"{side}_tokens_details") or {}


def usage_report(usage: Json) -> UsageReport:
    prompt = _details(usage, "input")
    thought = _details(usage, "output").get("reasoning_tokens")
    return UsageReport(chat_usage(usage), prompt.get("cached_tokens"), prompt.get("cache_write_tokens"), thought)


def _content(content: Any, emit: Emit, index: int) -> None:
    """The content of a message: a text, or a list of texts, text parts and thinking parts."""
    for part in cast("list[Any]", content) if isinstance(content, list) else [content]:
        if not isinstance(part, dict):
            emit_text(TextDelta, part, emit, index)
            continue
        known = cast("Json", part)
        emit_text(TextDelta, known.get("text"), emit, index)
        thought = known.get("thinking")
        for text in cast("list[Any]", thought) if isinstance(thought, list) else [thought]:
            emit_text(ReasoningDelta, text.get("text") if isinstance(text, dict) else text, emit, index)


def _fragment(place: int, call: Json, index: int, whole: bool) -> ToolCallFragment:
    """The calls of a whole message are told apart by their places alone."""
    custom = call.get("custom")
    function = custom or call.get("function") or {}
    arguments = function.get("input" if custom else "arguments")
    given = place if whole else call.get("index")
    return ToolCallFragment(
        -1 - place if given is None else given,
        call.get("id"),
        function.get("name"),
        arguments,
        index,
        bool(custom),
        call.get("extra_content"),
    )


def _joined(values: list[Any]) -> Any:
    """A field whose value came in pieces, as one."""
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, str) for value in values):
        return "".join(values)
    if not all(isinstance(value, list) for value in values):
        return values[-1]
    details: list[Json] = []
    for piece in [piece for value in values for piece in value]:
        last = details[-1] if details else {}
        if not _same_detail(last, piece):
            details.append(dict(piece))
            continue
        texts = {name: last.get(name, "") + piece[name] for name in ("text", "summary") if piece.get(name)}
        last |= {name: value for name, value in piece.items() if value is not None} | texts
    return details


def _same_detail(last: Json, piece: Json) -> bool:
    """Whether two pieces of OpenRouter's `reasoning_details` belong together."""
    return last.get("type") == piece.get("type") != "reasoning.encrypted" and last.get("index") == piece.get("index")


def _stop_string(choice: Json) -> str | None:
    """vLLM and SGLang name the stop string that ended an answer."""
    stops = [stop for stop in (choice.get("stop_reason"), choice.get("matched_stop")) if isinstance(stop, str)]
    return stops[-1] if stops else None


def _tokens(choice: Json, index: int) -> SampledTokens | None:
    prompt, token_ids, given = choice.get("prompt_token_ids"), choice.get("token_ids"), choice.get("logprobs")
    if not prompt and token_ids is None and not given:
        return None
    given = given if isinstance(given, dict) else {}
    listed: Any = given.get("content")
    entries = logprob_entries(listed)
    values = [entry["logprob"] for entry in entries] if listed is not None else given.get("token_logprobs")
    return SampledTokens(index, prompt, token_ids, values, entries)
