"""Content of messages as typed parts, the same for every wire format: text, images and files.

Dialects read the content of a message with `read_content`; spans and token estimates recognise the same images.
Content without any is a plain string, and strings are never searched for anything: whatever the text of a page or a
tool result looks like, it stays text. Files that only their provider can find, by an id, are not read here.

Digests of conversations are equal for messages that mean the same, however a client spells them.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, cast

import orjson

from agentlightning.chat.base import Message
from agentlightning.chat.messages import read_parts
from agentlightning.errors import DatasetError
from agentlightning.gateway.answer import NOT_JSON, json_of, object_of
from agentlightning.gateway.errors import bad_request
from agentlightning.tracing.messages import IMAGES, image_url, url_of
from agentlightning.util.json_values import Json, dumps


class TextPart(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image."""

    type: Literal["image"]
    url: str
    """Its address, or its bytes as a data URL."""
    detail: Any
    """The level of detail in OpenAI's terms; None: not given."""


class FilePart(TypedDict):
    """A file that is not an image."""

    type: Literal["file"]
    url: str
    """Its address, or its bytes as a data URL."""
    name: str | None


Part = TextPart | ImagePart | FilePart
Content = str | list[Part]
"""A list holds at least one image or file, and no two texts side by side."""

BILLING: Final = "x-anthropic-billing-header:"
"""The first block of Claude Code's system prompt, which differs between calls of one agent and means nothing to the
model."""
_FILE_TYPES: Final = ("document", "file", "input_file")


def parts_of(part: Any) -> list[Part] | None:
    """The parts of an image or a file in a request of any dialect; None for anything else, and for files that only
    their provider can find."""
    if not isinstance(part, dict):
        return None
    known = cast("Json", part)
    kind = known.get("type")
    if kind in IMAGES:
        return _image(known)
    return _file(known) if kind in _FILE_TYPES else None


def text_part(text: str) -> TextPart:
    return {"type": "text", "text": text}


def content_of(parts: Iterable[Part], between: str = "") -> Content:
    """The content of a message. Adjacent texts are joined with `between`."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and last["type"] == "text" and part["type"] == "text":
            found[-1] = text_part(last["text"] + between + part["text"])
        else:
            found.append(part)
    if all(part["type"] == "text" for part in found):
        return "".join(part["text"] for part in found if part["type"] == "text")
    return found


def merged_turns(first: Message, second: Message) -> Message:
    """Two messages of the assistant as one."""
    parts = [*non_empty_parts(first.get("content")), *non_empty_parts(second.get("content"))]
    merged: Message = {**first, "content": content_of(parts)}
    for name in ("tool_calls", "reasoning_content"):
        if name in second:
            merged[name] = merged[name] + second[name] if name in merged else second[name]
    return merged


def non_empty_parts(content: Content | None) -> list[Part]:
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return [part for part in content or () if part["type"] != "text" or part["text"]]


def has_attachments(content: Content | None) -> bool:
    return isinstance(content, list)


def read_content(
    where: str, content: Any, text_fields: Mapping[str, str], attachments: bool, between: str = ""
) -> Content:
    """The content of a message in a request. `text_fields` maps the types of text parts to the field with their text.

    Raises ApiError 400 on parts that cannot be read; images and files are read only with `attachments`."""
    try:
        return content_of(
            read_parts(where, content, text_fields, text_part, parts_of if attachments else None), between
        )
    except DatasetError as error:
        raise bad_request(where, str(error)) from None


def _image(part: Json) -> list[Part] | None:
    url = image_url(part)
    if url is None:
        return None
    return [{"type": "image", "url": url, "detail": part.get("detail") or object_of(part, "image_url").get("detail")}]


def _file(part: Json) -> list[Part] | None:
    if part.get("type") == "document":
        return _document(part)
    given = object_of(part, "file") if part.get("type") == "file" else part
    name, data, url = given.get("filename"), given.get("file_data"), given.get("file_url")
    if isinstance(data, str) and not data.startswith("data:"):
        kind = mimetypes.guess_type(name)[0] if isinstance(name, str) else None
        data = f"data:{kind or 'application/pdf'};base64,{data}"
    where = data if isinstance(data, str) else url
    return [_file_part(where, name)] if isinstance(where, str) else None


def _document(part: Json) -> list[Part] | None:
    """Anthropic's documents. Text documents become text, below their title."""
    source, title = object_of(part, "source"), part.get("title")
    kind, url = source.get("type"), url_of(source)
    if kind not in ("text", "content"):
        return None if url is None else [_file_part(url, title)]
    heading = [text_part(text) for text in (title, part.get("context")) if isinstance(text, str)]
    inner = source.get("data" if kind == "text" else "content")
    parts = read_parts("document", inner, {"text": "text"}, text_part, lambda part: parts_of(part) or ())
    content = content_of([*heading, *parts], "\n")
    return [text_part(content)] if isinstance(content, str) else content


def _file_part(url: str, name: Any) -> FilePart:
    return {"type": "file", "url": url, "name": name if isinstance(name, str) else None}


# -- digests -----------------------------------------------------------------------------------------------------------


def same_meaning(message: Message) -> bytes:
    """A message as bytes that are equal for messages with the same meaning.

    Content None equals "", a list of text parts equals their text, and tool-call arguments compare as JSON. The `name`
    that clients add to an assistant's message and unknown keys are ignored.
    """
    role = message["role"]
    calls = [_call_meaning(call) for call in message.get("tool_calls") or ()]
    name = None if role == "assistant" else message.get("name")
    return dumps([role, _content_meaning(message.get("content")), calls, message.get("tool_call_id"), name])


def _content_meaning(content: Any) -> Any:
    """Content of text parts as one string; content with images or files as its parts."""
    if isinstance(content, list) and any(part.get("type", "text") != "text" for part in content):
        return content
    return text_of(content)


def text_of(content: Any) -> str:
    """The text of a message's content, which is None, a string or a list of text parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _call_meaning(call: Json) -> list[Any]:
    function = call["function"]
    return [call.get("id"), function["name"], normalized_arguments(function["arguments"])]


def normalized_arguments(arguments: str) -> str:
    """Arguments as canonical JSON with sorted keys; unchanged if they are not JSON."""
    value = json_of(arguments)
    return arguments if value is NOT_JSON else dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def extend_digest(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation once `message` is appended."""
    return hashlib.blake2b(same_meaning(message), digest_size=16, key=digest).digest()


def message_digests(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """The digest of each prefix of a conversation, from the empty one to the whole."""
    digests = [b"agentlightning"]
    for message in messages:
        digests.append(extend_digest(digests[-1], message))
    return tuple(digests)


def turn_key(previous: Message | None, turn: Message) -> bytes:
    """The key to look up a turn of the assistant that a client sends back: the ids of its tool calls, which are unique,
    or else its text and the message before it. Earlier history may be cut or changed meanwhile."""
    calls: Sequence[Json] = turn.get("tool_calls") or ()
    if calls:
        meaning = dumps([call.get("id") for call in calls])
    else:
        meaning = (same_meaning(previous) if previous else b"") + b"\n" + same_meaning(turn)
    return hashlib.blake2b(meaning, digest_size=16).digest()
