"""Reads what providers answer to chat completions, completions and embeddings, whole or chunk by chunk."""

from __future__ import annotations

from typing import Any

from agentlightning.gateway.dialects.provider_events import (
    Emit,
    Finish,
    Json,
    ProviderFailure,
    ReasoningDelta,
    RefusalDelta,
    ResponseStart,
    SampledTokens,
    TextDelta,
    ToolCallFragment,
    Usage,
    UsageReport,
    choice_index,
    counted,
    logprob_entries,
)


class ChatEvents:
    """Reader of one answer."""

    def __init__(self, with_blocks: bool = False) -> None:
        """`with_blocks` has no meaning here: the format has no blocks that its provider wants back."""
        self._identified = False

    def read(self, data: Json, emit: Emit) -> None:
        """Emit the events of a whole answer or of one chunk."""
        if not self._identified:  # Each chunk names both.
            self._identified = bool(data.get("id") and data.get("model"))
            emit(ResponseStart(data.get("id"), data.get("model")))
        if usage := data.get("usage"):
            emit(_report(usage))
        if prompt := data.get("prompt_token_ids"):
            emit(SampledTokens(None, prompt))
        if error := data.get("error"):
            emit(ProviderFailure(error.get("message") if isinstance(error, dict) else str(error)))
        for choice in data.get("choices") or ():
            _choice(choice, emit)


def chat_usage(usage: Json) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return counted(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)


def _report(usage: Json) -> UsageReport:
    prompt, output = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    details = prompt.get("cached_tokens"), prompt.get("cache_write_tokens"), output.get("reasoning_tokens")
    return UsageReport(chat_usage(usage), *details)


def _choice(choice: Json, emit: Emit) -> None:
    index, whole = choice_index(choice.get("index")), choice.get("message")
    if tokens := _tokens(choice, index):
        emit(tokens)
    message = whole or choice.get("delta")
    if message is not None:
        _message(message, index, emit)
    elif isinstance(text := choice.get("text"), str) and text:
        emit(TextDelta(text, index))
    if (reason := choice.get("finish_reason")) or whole or message is None:
        emit(Finish(reason if isinstance(reason, str) and reason else None, _stop_string(choice), index))


def _message(message: Json, index: int, emit: Emit) -> None:
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought:
        emit(ReasoningDelta(thought, index))
    if isinstance(text := message.get("content"), str) and text:
        emit(TextDelta(text, index))
    if isinstance(refusal := message.get("refusal"), str) and refusal:
        emit(RefusalDelta(refusal, index))
    for place, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        place = call.get("index", place)
        emit(ToolCallFragment(place, call.get("id"), function.get("name"), function.get("arguments"), index))


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
    entries = logprob_entries(listed) if isinstance(listed, list) else []
    values = [entry["logprob"] for entry in entries] if listed is not None else given.get("token_logprobs")
    return SampledTokens(index, prompt, token_ids, values, entries)
