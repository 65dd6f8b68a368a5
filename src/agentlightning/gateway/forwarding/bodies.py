"""What the bodies for all providers share: the parameters that were set, the response format, the order of turns.

What a provider's dialect cannot express is rejected by name if it would change the answer, and otherwise dropped and
counted by the caller.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, Protocol

from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.answer import THOUGHTS, Json
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import ApiPath, Request
from agentlightning.gateway.dialects.common import MESSAGES_PARAMS, RESPONSES_PARAMS, shorten
from agentlightning.gateway.dialects.content_parts import (
    Content,
    Part,
    joined,
    non_empty_parts,
    object_of,
    same_meaning,
    turn_key,
)
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.upstream.provider import Provider

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


# -- tools of OpenAI's APIs --------------------------------------------------------------------------------------------


def openai_tools(request: Request, written: Callable[[Json], Json], nested: bool) -> Json:
    """The tools of a request, each as it is `written`, and their choice; chat completions nests the details of a choice
    below the name of its kind (`nested`), responses does not."""
    if request.forbidden_tools:
        return {"tools": [written(tool) for tool in request.forbidden_tools], "tool_choice": "none"}
    if not request.tools:
        return {}
    found: Json = {"tools": [written(tool) for tool in request.tools]}
    constraint = request.constraint
    mode = "required" if constraint.requires_tool_call else "auto"
    names = [_choice("function", {"name": name}, nested) for name in sorted(constraint.names or ())]
    if constraint.names is None:
        found |= {"tool_choice": mode} if constraint.requires_tool_call else {}
    elif constraint.requires_tool_call and len(names) == 1:
        found["tool_choice"] = names[0]
    else:
        found["tool_choice"] = _choice("allowed_tools", {"mode": mode, "tools": names}, nested)
    return found | ({"parallel_tool_calls": False} if constraint.single_tool_call else {})


def _choice(kind: str, details: Json, nested: bool) -> Json:
    return {"type": kind, **({kind: details} if nested else details)}


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


def known_turn(
    path: ApiPath, messages: Sequence[Message], index: int, find_turn: TurnLookup
) -> tuple[list[Json] | None, list[Json]]:
    """(the blocks or items that the provider wrote of a turn of the assistant, if it still means the same; what to send
    back of the turn if it does not)."""
    turn = messages[index]
    before = find_turn(turn_key(messages[index - 1] if index else None, turn))
    response, is_blocks = DIALECTS[path].response(), path == "messages"
    response.read({"type": "message", "content": before} if is_blocks else {"object": "response", "output": before})
    answer = response.choice()
    answer.take_new(done=True)
    is_unchanged = bool(before) and same_meaning(answer.message) == same_meaning(turn)
    kinds = THOUGHTS if is_blocks else ("reasoning",)
    thoughts = [block for block in before or turn.get("sealed") or () if block["type"] in kinds]
    return before if is_unchanged else None, thoughts


# -- content -----------------------------------------------------------------------------------------------------------


class UnsupportedContentError(ValueError):
    """An image or a file that the provider's dialect cannot express; the message says which, and what to do."""


def as_chat(content: Content) -> str | list[Json]:
    """The content of a message for chat completions. Raises UnsupportedContentError for a file given by its address."""
    return content if isinstance(content, str) else [_chat_part(part) for part in non_empty_parts(content)]


def as_blocks(content: Content) -> list[Json]:
    """The content of a message for Anthropic's messages, without empty texts."""
    return [_block(part) for part in non_empty_parts(content)]


def as_items(content: Content) -> str | list[Json]:
    """The content of a message, or the output of a call, for OpenAI's responses."""
    return content if isinstance(content, str) else [_item_part(part) for part in non_empty_parts(content)]


def as_text(content: Content, where: str) -> str:
    """Content that must be text. Raises UnsupportedContentError if it is not."""
    if isinstance(content, str):
        return content
    raise UnsupportedContentError(f"{where} has an image or a file, which this provider accepts from a user only")


def split_attachments(content: Content) -> tuple[str, list[Json]]:
    """(the text, each image and file as a part for chat completions). Raises UnsupportedContentError as `as_chat`."""
    parts = non_empty_parts(content)
    words = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(words), [_chat_part(part) for part in parts if part["type"] != "text"]


def _chat_part(part: Part) -> Json:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    url = part["url"]
    if part["type"] == "image":
        detail = {} if part["detail"] is None else {"detail": part["detail"]}
        return {"type": "image_url", "image_url": {"url": url} | detail}
    name = part["name"]
    if not url.startswith("data:"):
        raise UnsupportedContentError(
            f"the file {url!r} is given by its address, which chat completions does not take; send its bytes"
        )
    if (text := _text_of(url)) is not None:
        return {"type": "text", "text": f"{name}\n{text}" if name else text}
    return {"type": "file", "file": {"filename": name or f"document{_suffix(url)}", "file_data": url}}


def _item_part(part: Part) -> Json:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    url = part["url"]
    if part["type"] == "image":
        return {"type": "input_image", "image_url": url, "detail": part["detail"] or "auto"}
    name = part["name"]
    if not url.startswith("data:"):
        return {"type": "input_file", "file_url": url}
    return {"type": "input_file", "filename": name or f"document{_suffix(url)}", "file_data": url}


def _block(part: Part) -> Json:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    url = part["url"]
    if part["type"] == "image":
        return {"type": "image", "source": _source(url)}
    title = {"title": part["name"]} if part["name"] else {}
    if (text := _text_of(url)) is not None:
        return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}} | title
    return {"type": "document", "source": _source(url)} | title


def _source(url: str) -> Json:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url[len("data:") :].partition(",")
    return {"type": "base64", "media_type": head.partition(";")[0], "data": data}


def _text_of(url: str) -> str | None:
    """The text of a text file; None for any other file."""
    head, _, data = url.partition(",")
    if not head.startswith("data:text/"):
        return None
    try:
        return base64.b64decode(data, validate=True).decode() if head.endswith(";base64") else None
    except (binascii.Error, UnicodeDecodeError):
        return None


def _suffix(url: str) -> str:
    kind = url[len("data:") :].partition(",")[0].partition(";")[0]
    return mimetypes.guess_extension(kind) or ".pdf"
