"""What a provider answers, gathered from its own words as they pass: messages, usage, tokens, why it ended.

One reader for each dialect takes whole answers and events of streams alike. It never fails on an answer that is not as
expected: what it cannot read is not recorded, and the caller has it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec
from msgspec import Struct, structs

from agentlightning.gateway.recording.otel_messages import tool_call
from agentlightning.gateway.upstream.provider import Usage

Json = dict[str, Any]

_REASONS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "max_output_tokens": "length",
    "model_context_window_exceeded": "length",
}
"""Why an answer ended, by OpenAI's names."""


@dataclass(slots=True)
class Call:
    """A tool call as it comes in."""

    id: Any = None
    name: str = ""
    arguments: list[Any] = field(default_factory=list[Any])
    """Pieces of text, or one object."""


@dataclass(slots=True)
class Choice:
    """One answer."""

    index: int = 0
    text: list[str] = field(default_factory=list[str])
    thought: list[str] = field(default_factory=list[str])
    calls: dict[Any, Call] = field(default_factory=dict[Any, Call])
    reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None

    def message(self) -> Json:
        """As OpenTelemetry has it."""
        parts: list[Json] = []
        if thought := "".join(self.thought):
            parts.append({"type": "reasoning", "content": thought})
        if text := "".join(self.text):
            parts.append({"type": "text", "content": text})
        for call in self.calls.values():
            whole = call.arguments[0] if call.arguments and isinstance(call.arguments[0], dict) else None
            written = "".join(piece for piece in call.arguments if isinstance(piece, str))
            parts.append(tool_call(call.id, call.name, written if whole is None else whole))
        reason = "tool_call" if self.reason == "tool_calls" else self.reason or "error"  # OTel's is singular
        return {"role": "assistant", "parts": parts, "finish_reason": reason}


@dataclass(slots=True)
class Heard:
    """Everything that has been heard of one call."""

    id: str = ""
    model: str = ""
    usage: Usage | None = None
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    prompt_token_ids: list[int] | None = None
    error: str | None = None
    """What the provider said went wrong, in the middle of a stream."""

    def choice(self, index: Any) -> Choice:
        index = index if isinstance(index, int) and index >= 0 else 0
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = Choice(index)
        return found


Reader = Callable[[Heard, Json], None]


def hear(read: Reader, heard: Heard, data: Any) -> None:
    """Take in a whole answer or one event. What is not as expected is passed over."""
    if not isinstance(data, dict):
        return
    try:
        read(heard, cast("Json", data))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return


def _usage(*counts: Any) -> Usage:
    return Usage(*(count if isinstance(count, int) and count > 0 else 0 for count in counts))


def _head(heard: Heard, data: Json) -> None:
    if not heard.id and isinstance(name := data.get("id"), str):
        heard.id = name
    if not heard.model and isinstance(model := data.get("model"), str):
        heard.model = model


# -- OpenAI's chat completions, completions and embeddings -----------------------------------------------------------


def _openai(heard: Heard, data: Json) -> None:
    _head(heard, data)
    if usage := data.get("usage"):
        heard.usage = _openai_usage(usage)
    if prompt := data.get("prompt_token_ids"):
        heard.prompt_token_ids = prompt
    if error := data.get("error"):
        heard.error = error.get("message") if isinstance(error, dict) else str(error)
    for given in data.get("choices") or ():
        _openai_choice(heard.choice(given.get("index") or 0), given)


def _openai_usage(usage: Json) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return _usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)


def _openai_choice(choice: Choice, given: Json) -> None:
    said = given.get("message") or given.get("delta")
    if said is None:
        _add(choice.text, given.get("text"))
    else:
        _add(choice.text, said.get("content"))
        _add(choice.text, said.get("refusal"))
        _add(choice.thought, said.get("reasoning_content") or said.get("reasoning"))
        for place, call in enumerate(said.get("tool_calls") or ()):
            _openai_call(choice, call.get("index", place), call)
    if isinstance(reason := given.get("finish_reason"), str) and reason:
        choice.reason = reason
    if prompt := given.get("prompt_token_ids"):
        choice.prompt_token_ids = prompt
    if (token_ids := given.get("token_ids")) is not None:
        choice.token_ids = [*(choice.token_ids or ()), *token_ids]
    if logprobs := given.get("logprobs"):
        listed = logprobs.get("content")
        values = logprobs.get("token_logprobs") if listed is None else [each["logprob"] for each in listed]
        choice.logprobs = [*(choice.logprobs or ()), *(values or ())]


def _openai_call(choice: Choice, place: Any, given: Json) -> None:
    call = choice.calls.setdefault(place, Call())
    function = given.get("function") or {}
    call.id = given.get("id") or call.id
    call.name += function.get("name") or ""
    if arguments := function.get("arguments"):
        call.arguments.append(arguments)


def _add(texts: list[str], text: Any) -> None:
    if isinstance(text, str) and text:
        texts.append(text)


# -- OpenAI's responses ----------------------------------------------------------------------------------------------


def _responses(heard: Heard, data: Json) -> None:
    kind = data.get("type")
    if kind == "response.output_text.delta":
        return _add(heard.choice(0).text, data.get("delta"))
    if kind == "error":
        heard.error = str(data.get("message"))
        return
    whole = data.get("response", data if data.get("object") == "response" else None)
    if whole is None:
        return
    _head(heard, whole)
    if kind in (None, "response.completed", "response.incomplete", "response.failed"):
        _response(heard, whole)


def _response(heard: Heard, whole: Json) -> None:
    if usage := whole.get("usage"):
        heard.usage = _responses_usage(usage)
    choice = heard.choices[0] = Choice()
    for item in whole.get("output") or ():
        kind = item.get("type")
        if kind == "function_call":
            choice.calls[len(choice.calls)] = Call(item.get("call_id"), item.get("name") or "", [item.get("arguments")])
        parts = (item.get("content") or []) + (item.get("summary") or [])
        for part in parts:
            _add(choice.thought if kind == "reasoning" else choice.text, part.get("text") or part.get("refusal"))
    if whole.get("status") == "failed":
        heard.error = str((whole.get("error") or {}).get("message"))
    why = (whole.get("incomplete_details") or {}).get("reason")
    choice.reason = _REASONS.get(why, why) if why else "tool_calls" if choice.calls else "stop"


def _responses_usage(usage: Json) -> Usage:
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
    return _usage(usage.get("input_tokens"), usage.get("output_tokens"), cached)


# -- Anthropic's messages --------------------------------------------------------------------------------------------


def _messages(heard: Heard, data: Json) -> None:
    kind = data.get("type")
    if kind in ("message_start", "message"):
        message = data.get("message", data)
        _head(heard, message)
        for place, block in enumerate(message.get("content") or ()):
            _block(heard.choice(0), place, block)
        _stopped(heard, message, message)
    elif kind == "content_block_start":
        _block(heard.choice(0), data.get("index"), data["content_block"])
    elif kind == "content_block_delta":
        _block(heard.choice(0), data.get("index"), data["delta"])
    elif kind == "message_delta":
        _stopped(heard, data["delta"], data)
    elif kind == "error":
        heard.error = str((data.get("error") or {}).get("message"))


def _stopped(heard: Heard, said: Json, counted: Json) -> None:
    if reason := said.get("stop_reason"):
        heard.choice(0).reason = _REASONS.get(reason, reason)
    if not (usage := counted.get("usage")):
        return
    heard.usage = _messages_usage(usage, heard.usage or _NOTHING)


_NOTHING: Final = Usage()


def _messages_usage(usage: Json, before: Usage = _NOTHING) -> Usage:
    """`before`: what an earlier event of the same answer said."""
    cached, written = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
    prompt = (usage.get("input_tokens") or 0) + cached + written
    drawn = usage.get("output_tokens") or before.output_tokens
    if not prompt:
        return structs.replace(before, output_tokens=_usage(drawn).input_tokens)
    hour = (usage.get("cache_creation") or {}).get("ephemeral_1h_input_tokens") or 0
    if not hour and written == before.written_tokens + before.written_hour_tokens:  # the end says less than the start
        hour = before.written_hour_tokens
    return _usage(prompt, drawn, cached or before.cached_tokens, written - hour, hour)


def _block(choice: Choice, place: Any, block: Json) -> None:
    """A block of content, or some more of one."""
    _add(choice.text, block.get("text"))
    _add(choice.thought, block.get("thinking"))
    if block.get("type") == "tool_use":
        given = block.get("input")
        choice.calls[place] = Call(block.get("id"), block.get("name") or "", [given] if given else [])
    elif block.get("type") == "input_json_delta" and place in choice.calls:
        choice.calls[place].arguments.append(block.get("partial_json") or "")


READERS: Final[Mapping[str, Reader]] = {
    "chat/completions": _openai,
    "completions": _openai,
    "embeddings": _openai,
    "responses": _responses,
    "messages": _messages,
}


_USAGES: Final[Mapping[str, Callable[[Json], Usage]]] = {
    "chat/completions": _openai_usage,
    "completions": _openai_usage,
    "embeddings": _openai_usage,
    "responses": _responses_usage,
    "messages": _messages_usage,
}


def usage_of(path: str, usage: Any) -> Usage | None:
    """What the `usage` of a whole answer says; None where that is not as expected."""
    if not usage or not isinstance(usage, dict):
        return None
    try:
        return _USAGES[path](cast("Json", usage))
    except (AttributeError, TypeError):
        return None


class _Named(Struct):
    """Of an answer, what it is called; the rest is passed over."""

    id: Any = None


_named: Final = msgspec.json.Decoder(_Named)


def id_of(answer: bytes) -> str:
    """What a whole answer is called; "" where it does not say. Raises MsgspecError for what is no JSON object."""
    name = _named.decode(answer).id
    return name if isinstance(name, str) else ""
