"""What the bodies for all providers share: the parameters that were set, the response format, the order of turns.

What a provider's dialect cannot express is rejected by name if it would change the answer, and otherwise dropped and
counted by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, Protocol

from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.content_parts import joined, object_of
from agentlightning.gateway.dialects.message_digest import same_meaning
from agentlightning.gateway.dialects.sampling import MESSAGES_PARAMS, RESPONSES_PARAMS
from agentlightning.gateway.dialects.validation import shorten
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.util.json_values import dumps

Json = dict[str, Any]
TurnLookup = Callable[[bytes], list[Json]]
"""Finds a turn as its provider wrote it, by its key; empty if it is not known."""
Extras = tuple[Json, frozenset[str]]
"""(fields of the body, the fields of the request they come from)."""


class Write(Protocol):
    """Writes the body for one path."""

    def __call__(self, request: Request, provider: Provider, model: str, params: Json, find_turn: TurnLookup) -> Json:
        """`params`: the sampling parameters that were set, by their names in `SamplingParams`. Raises ApiError 400
        naming a field that the dialect cannot express."""
        ...


_READERS: Final = {**RESPONSES_PARAMS, **MESSAGES_PARAMS}
_NEUTRAL: Final = SamplingParams()


def given_params(raw: Mapping[str, Any], params: SamplingParams, forced: Mapping[str, Any]) -> Json:
    """The sampling parameters that were set, by their names in `SamplingParams`: our defaults are never sent."""
    named = {_READERS[name][0] for name in (*raw, *forced) if name in _READERS and _set(raw, forced, name)}
    return {name: getattr(params, name) for name in sorted(named)}


def _set(raw: Mapping[str, Any], forced: Mapping[str, Any], name: str) -> bool:
    return raw.get(name) is not None or forced.get(name) is not None


def response_format_of(raw: Mapping[str, Any]) -> Json | None:
    """The response format of a request in terms of chat completions; None for plain text."""
    flat = object_of(raw, "text").get("format") or object_of(raw, "output_config").get("format")
    shape = raw.get("response_format") or flat or raw.get("output_format")
    if not isinstance(shape, dict) or shape.get("type") in (None, "text"):
        return None
    if shape["type"] != "json_schema" or "json_schema" in shape:
        return dict(shape)
    named = {key: shape[key] for key in ("name", "schema", "strict", "description") if shape.get(key) is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True} | named}


# -- unsupported fields -----------------------------------------------------------------------------------------------

_ALIASES: Final = {
    "response_format": ("response_format", "text"),
    "logprobs": ("logprobs", "top_logprobs", "include"),
}


def reject_unsupported(
    fields: Sequence[tuple[str, Any, bool]], request: Request, provider: Provider, path: str
) -> None:
    """Raises ApiError 400 for the first unsupported one of `fields` (name, value, whether it is supported), by its name
    in the request."""
    for field, value, supported in fields:
        if not supported:
            name = next((name for name in _ALIASES.get(field, ()) if request.raw.get(name)), field)
            message = (
                f"{name}={shorten(value)} cannot be sent to the provider {provider.name!r}, which speaks /v1/{path}"
            )
            raise bad_request(name, f"{message}; leave it out")


def unknown_params(params: Json, known: Container[str]) -> list[tuple[str, Any, bool]]:
    """For `reject_unsupported`: the parameters that a dialect does not have. They may have their default values."""
    return [(name, value, value == getattr(_NEUTRAL, name)) for name, value in params.items() if name not in known]


def split_stops(path: str, stops: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(stop strings for the provider, stop strings to apply here): the responses API has none, and Anthropic takes none
    of whitespace only."""
    if path == "responses":
        return (), tuple(stops)
    if path != "messages":
        return tuple(stops), ()
    return tuple(stop for stop in stops if stop.strip()), tuple(stop for stop in stops if not stop.strip())


# -- the order of turns ------------------------------------------------------------------------------------------------


def results_first(messages: Sequence[Message]) -> list[Message]:
    """The messages with tool results right after the turn that called the tools, as every provider requires."""
    sorted_: list[Message] = []
    answered: list[Message] | None = None
    others: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            sorted_ += [*others, message]
            answered, others = [], []
        elif answered is not None and message["role"] == "tool":
            sorted_.append(message)
        else:
            others.append(message)
    return sorted_ + others


def turns_of(messages: Sequence[Message]) -> list[Message]:
    """A conversation with one message for each turn of the assistant, whose text and calls clients may send apart, and
    tool results right after it."""
    merged: list[Message] = []
    for message in results_first(messages):
        last = merged[-1] if merged else None
        if last is None or message["role"] != "assistant" or last["role"] != "assistant":
            merged.append(message)
            continue
        both = {"content": joined(last.get("content"), message.get("content"))}
        lists = {
            key: [*last.get(key, ()), *message.get(key, ())]
            for key in ("tool_calls", "sealed")
            if key in last or key in message
        }
        merged[-1] = {**last, **both, **lists}
    return merged


def is_unchanged(before: Sequence[Json], turn: Message) -> bool:
    """Whether a turn of the assistant means the same as `before`, the blocks or items that its provider wrote."""
    return bool(before) and same_meaning(_message_of(before)) == same_meaning(turn)


def _message_of(written: Sequence[Json]) -> Message:
    texts: list[str] = []
    calls: list[Json] = []
    for part in written:
        match part["type"]:
            case "text":
                texts.append(part["text"])
            case "message":
                texts += [inner.get("text", inner.get("refusal")) or "" for inner in part["content"]]
            case "tool_use":
                arguments = dumps(part["input"]).decode()
                calls.append({"id": part["id"], "function": {"name": part["name"], "arguments": arguments}})
            case "function_call":
                arguments = part["arguments"] or "{}"
                calls.append({"id": part["call_id"], "function": {"name": part["name"], "arguments": arguments}})
            case _:
                pass
    return {"role": "assistant", "content": "".join(texts), "tool_calls": calls}
