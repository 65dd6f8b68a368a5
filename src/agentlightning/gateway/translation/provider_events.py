"""What a provider says, told in order: the events of its stream, or its whole answer, as pieces for another dialect.

Beside `gateway.heard`, which gathers the same words for the record: a translated answer needs them one by one, and
needs what no record has, signatures and refusals among it. It never fails: what is not as expected is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentlightning.gateway.dialects.base import Head
from agentlightning.gateway.dialects.sse import loads
from agentlightning.gateway.translation.provider_answer import Told

Json = dict[str, Any]

RESPONSE_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")
"""Types of the events that end the stream of a response."""
_REASONS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "function_call": "tool_calls",
}
"""Why an answer ended -> by chat completions' names."""


@dataclass(slots=True)
class Telling:
    """One answer while it is told."""

    told: Told
    head: Head
    blocks: dict[Any, Json] = field(default_factory=dict[Any, Json])
    """Of Anthropic's: those that are not whole, by their index."""
    pieces: dict[Any, dict[str, list[str]]] = field(default_factory=dict[Any, dict[str, list[str]]])
    """What has come of each, by the name of its field: put together at its end."""
    grown: set[Any] = field(default_factory=set[Any])
    """Of OpenAI's items: the indexes of those that came in parts."""

    def take(self, path: str, data: Any) -> None:
        """Take in a whole answer or one event."""
        if not isinstance(data, dict):
            return
        try:
            _TELLERS[path](self, cast("Json", data))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError):
            return

    def count(self, cached: Any = None, written: Any = None, thought: Any = None) -> None:
        """Tokens of the prompt and the answer, of which there are also others."""
        self.head.cached_tokens = _count(cached, self.head.cached_tokens)
        self.head.cached_now_tokens = _count(written, self.head.cached_now_tokens)
        self.head.thought_tokens = _count(thought, self.head.thought_tokens)


def _count(given: Any, before: int | None) -> int | None:
    return given if type(given) is int and 0 <= given < 2**53 else before


# -- chat completions ------------------------------------------------------------------------------------------------


def _tell_chat(telling: Telling, data: Json) -> None:
    if usage := data.get("usage"):
        prompt, drawn = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
        telling.count(prompt.get("cached_tokens"), prompt.get("cache_write_tokens"), drawn.get("reasoning_tokens"))
    for choice in data.get("choices") or ():
        if not choice.get("index"):
            _tell_choice(telling.told, choice)


def _tell_choice(told: Told, choice: Json) -> None:
    said = choice.get("message") or choice.get("delta") or {}
    told.think(said.get("reasoning_content") or said.get("reasoning"))
    told.say(said.get("content"), _logprobs(choice))
    told.refuse(said.get("refusal"))
    for place, call in enumerate(said.get("tool_calls") or ()):
        function = call.get("function") or {}
        told.call(call.get("index", place), call.get("id"), function.get("name"), function.get("arguments"))
    if isinstance(reason := choice.get("finish_reason"), str) and reason:
        told.reason = _REASONS.get(reason, reason)
    for stop in (choice.get("stop_reason"), choice.get("matched_stop")):  # vLLM's and SGLang's words for it.
        told.stopped_by = stop if isinstance(stop, str) else told.stopped_by


def _logprobs(choice: Json) -> list[Json]:
    listed = (choice.get("logprobs") or {}).get("content") or ()
    return [_token(each) | {"top_logprobs": [_token(top) for top in each.get("top_logprobs") or ()]} for each in listed]


def _token(given: Json) -> Json:
    text = given.get("token")
    text = text if isinstance(text, str) else ""
    known = given.get("bytes")
    return {"token": text, "logprob": given["logprob"], "bytes": list(text.encode()) if known is None else known}


# -- Anthropic's messages --------------------------------------------------------------------------------------------


def _tell_messages(telling: Telling, data: Json) -> None:
    place = data.get("index")
    match data.get("type"):
        case "message":
            for index, block in enumerate(data.get("content") or ()):
                _begin(telling, index, block)
                _end(telling, index)
            _stopped(telling, data, data.get("usage"))
        case "message_start":
            _stopped(telling, {}, data["message"].get("usage"))
        case "content_block_start":
            _begin(telling, place, data["content_block"])
        case "content_block_delta":
            _more(telling, place, data["delta"])
        case "content_block_stop":
            _end(telling, place)
        case "message_delta":
            _stopped(telling, data["delta"], data.get("usage"))
        case _:
            pass


def _stopped(telling: Telling, said: Json, usage: Any) -> None:
    told = telling.told
    if isinstance(reason := said.get("stop_reason"), str):
        told.reason = _REASONS.get(reason, reason)
    if isinstance(stop := said.get("stop_sequence"), str):
        told.stopped_by = stop
    if isinstance(usage, dict):
        counts = cast("Json", usage)
        thought = (counts.get("output_tokens_details") or {}).get("thinking_tokens")
        telling.count(counts.get("cache_read_input_tokens"), counts.get("cache_creation_input_tokens"), thought)


def _begin(telling: Telling, place: Any, block: Json) -> None:
    telling.blocks[place] = dict(block)
    match block.get("type"):
        case "text":
            telling.told.say(block.get("text"))
        case "thinking":
            telling.told.think(block.get("thinking"))
        case "tool_use":
            telling.told.call(place, block.get("id"), block.get("name"), block.get("input") or None)
        case _:
            pass


def _more(telling: Telling, place: Any, delta: Json) -> None:
    block = telling.blocks[place]
    match delta.get("type"):
        case "text_delta":
            _grow(telling, place, "text", delta)
            telling.told.say(delta.get("text"))
        case "thinking_delta":
            _grow(telling, place, "thinking", delta)
            telling.told.think(delta.get("thinking"))
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            _grow(telling, place, "partial_json", delta)
            telling.told.call(place, None, None, delta["partial_json"])
        case _:
            pass


def _grow(telling: Telling, place: Any, name: str, delta: Json) -> None:
    telling.pieces.setdefault(place, {}).setdefault(name, []).append(delta[name])


def _end(telling: Telling, place: Any) -> None:
    block = telling.blocks.pop(place)
    grown = {name: "".join(pieces) for name, pieces in telling.pieces.pop(place, {}).items()}
    written = grown.pop("partial_json", "")
    block |= {name: block.get(name, "") + text for name, text in grown.items()}
    if block.get("type") == "tool_use":
        telling.told.end_call(place)
        if written:
            try:
                block["input"] = loads(written.encode())
            except ValueError:  # Cut off: it cannot be sent back as it is.
                return
    telling.told.keep(block)


# -- OpenAI's responses ----------------------------------------------------------------------------------------------


def _tell_response(telling: Telling, data: Json) -> None:
    kind, place = data.get("type"), data.get("output_index")
    if kind is None or kind in RESPONSE_ENDS:
        _tell_whole(telling, data.get("response", data))
    elif kind == "response.output_item.done":
        _tell_item(telling, place, data["item"])
    elif kind == "response.output_item.added" and data["item"].get("type") == "function_call":
        item = data["item"]
        telling.told.call(place, item.get("call_id"), item.get("name"), item.get("arguments"))
    elif kind == "response.reasoning_summary_part.added" and data.get("summary_index"):
        telling.told.think("\n\n")
    elif isinstance(kind, str) and kind.endswith(".delta"):
        telling.grown.add(place)
        _tell_delta(telling.told, kind, place, data)


def _tell_delta(told: Told, kind: str, place: Any, data: Json) -> None:
    match kind:
        case "response.output_text.delta":
            told.say(data["delta"], _logprobs({"logprobs": {"content": data.get("logprobs")}}))
        case "response.refusal.delta":
            told.refuse(data["delta"])
        case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
            told.think(data["delta"])
        case "response.function_call_arguments.delta":
            told.call(place, None, None, data["delta"])
        case _:
            pass


def _tell_whole(telling: Telling, response: Json) -> None:
    for place, item in enumerate(response.get("output") or ()):
        if place not in telling.grown:
            _tell_item(telling, place, item)
    why = (response.get("incomplete_details") or {}).get("reason")
    telling.told.reason = _REASONS.get(why, why) if isinstance(why, str) else "stop"
    if usage := response.get("usage"):
        prompt, drawn = usage.get("input_tokens_details") or {}, usage.get("output_tokens_details") or {}
        telling.count(prompt.get("cached_tokens"), prompt.get("cache_write_tokens"), drawn.get("reasoning_tokens"))


def _tell_item(telling: Telling, place: Any, item: Json) -> None:
    """A whole item, of which nothing is told twice."""
    told, kind = telling.told, item.get("type")
    if place not in telling.grown:
        telling.grown.add(place)
        for part in item.get("content") or item.get("summary") or ():
            if kind == "reasoning":
                told.think(part.get("text"))
            else:
                told.say(part.get("text"), _logprobs({"logprobs": {"content": part.get("logprobs")}}))
                told.refuse(part.get("refusal"))
        if kind == "function_call":
            told.call(place, item.get("call_id"), item.get("name"), item.get("arguments"))
    if kind == "function_call":
        told.end_call(place)
    told.keep(item)


_TELLERS: Final[Mapping[str, Callable[[Telling, Json], None]]] = {
    "chat/completions": _tell_chat,
    "messages": _tell_messages,
    "responses": _tell_response,
}
"""By the path that is asked."""
