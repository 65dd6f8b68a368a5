"""What the bodies for every provider have in common: what was set, the shape that is asked for, the order of turns.

Pure, as all of this folder. What a provider's dialect has no word for, and would change what is answered, is refused by
name; what would change nothing is left out, and counted by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, Protocol

from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.content_parts import joined
from agentlightning.gateway.dialects.sampling import MESSAGES_PARAMS, RESPONSES_PARAMS
from agentlightning.gateway.dialects.validation import shorten
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.upstream.provider import Provider

Json = dict[str, Any]
TurnLookup = Callable[[bytes], list[Json]]
"""A turn as the provider said it, by its key; empty where nobody knows."""
Extras = tuple[Json, frozenset[str]]
"""(fields of the body, names of the request's fields they come from)."""


class Write(Protocol):
    """Writes the body for one path."""

    def __call__(self, request: Request, provider: Provider, model: str, params: Json, blocks: TurnLookup) -> Json:
        """`params` are the sampling parameters that somebody set, by the names of `SamplingParams`. Raises ApiError 400
        naming what cannot be asked."""
        ...


_READERS: Final = {**RESPONSES_PARAMS, **MESSAGES_PARAMS}
_NEUTRAL: Final = SamplingParams()


def given_params(asked: Mapping[str, Any], params: SamplingParams, forced: Mapping[str, Any]) -> Json:
    """The sampling parameters that somebody set, by the names of `SamplingParams`: no default of ours is sent."""
    named = {_READERS[name][0] for name in (*asked, *forced) if name in _READERS and _set(asked, forced, name)}
    return {name: getattr(params, name) for name in sorted(named)}


def _set(asked: Mapping[str, Any], forced: Mapping[str, Any], name: str) -> bool:
    return asked.get(name) is not None or forced.get(name) is not None


def shape_of(asked: Mapping[str, Any]) -> Json | None:
    """The format of the content that a request asks for, as chat completions has it; None for plain text."""
    flat = object_of(asked, "text").get("format") or object_of(asked, "output_config").get("format")
    shape = asked.get("response_format") or flat or asked.get("output_format")
    if not isinstance(shape, dict) or shape.get("type") in (None, "text"):
        return None
    if shape["type"] != "json_schema" or "json_schema" in shape:
        return dict(shape)
    named = {key: shape[key] for key in ("name", "schema", "strict", "description") if shape.get(key) is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True} | named}


def object_of(data: Mapping[str, Any], name: str) -> Json:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


# -- what cannot be asked ----------------------------------------------------------------------------------------------

_ELSEWHERE: Final = {
    "response_format": ("response_format", "text"),
    "logprobs": ("logprobs", "top_logprobs", "include"),
}


def reject_unsupported(asked: Sequence[tuple[str, Any, bool]], request: Request, provider: Provider, path: str) -> None:
    """Of (parameter, value, whether it can be asked): raises ApiError 400 for the first that cannot, by the name that
    the request has for it."""
    for meant, value, fine in asked:
        if not fine:
            name = next((name for name in _ELSEWHERE.get(meant, ()) if request.raw.get(name)), meant)
            message = (
                f"{name}={shorten(value)} cannot be asked of the provider {provider.name!r}, which speaks /v1/{path}"
            )
            raise bad_request(name, f"{message}; leave it out")


def foreign(params: Json, known: Container[str]) -> list[tuple[str, Any, bool]]:
    """For `refuse`: the parameters that a dialect has no word for. With the values they have anyway they are left
    out."""
    return [(name, value, value == getattr(_NEUTRAL, name)) for name, value in params.items() if name not in known]


def split_stops(path: str, stops: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(stop strings that a provider is asked for, those at which its answer has to be ended here): responses know none,
    Anthropic none that is whitespace alone."""
    if path == "responses":
        return (), tuple(stops)
    if path != "messages":
        return tuple(stops), ()
    return tuple(stop for stop in stops if stop.strip()), tuple(stop for stop in stops if not stop.strip())


# -- the order of turns ------------------------------------------------------------------------------------------------


def results_first(messages: Sequence[Message]) -> list[Message]:
    """Results of tools right behind the turn that called them, as every provider demands; all else in its order."""
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
    """A conversation with the messages of one turn of the assistant as one, since clients may send its words and its
    calls apart, and the results of its calls right behind it."""
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
