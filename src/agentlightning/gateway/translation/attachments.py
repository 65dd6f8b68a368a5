"""Content of a message as typed parts, between dialects: texts, images and files.

A dialect reads each image or file of a request with `parts_of`; the bodies for providers write them with `as_chat`,
`as_blocks` and `as_items`. Content without any is a plain string, and a string is never looked into: whatever a page or
the result of a tool says, it stays text. What only its provider can find, by an id, is not read: the dialect refuses it
by name. Pure.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypedDict, cast

Json = dict[str, Any]


class TextPart(TypedDict):
    """Some text."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image."""

    type: Literal["image"]
    url: str
    """Where it is; its bytes as a data URL."""
    detail: Any
    """How closely it is looked at, in OpenAI's words; None: nobody said."""


class FilePart(TypedDict):
    """A file that is no image."""

    type: Literal["file"]
    url: str
    """Where it is; its bytes as a data URL."""
    name: str | None


Part = TextPart | ImagePart | FilePart
Content = str | list[Part]
"""A list holds at least one image or file, and no two texts side by side."""

_IMAGES: Final = ("image", "image_url", "input_image")
_FILES: Final = ("document", "file", "input_file")


class UnsupportedContentError(ValueError):
    """An image or a file that the provider's dialect has no place for; the text says which, and what to do."""


# -- reading -----------------------------------------------------------------------------------------------------------


def parts_of(part: Any) -> list[Part] | None:
    """An image or a file as it stands in a request of any dialect; None for what is neither, and for what only its
    provider can find."""
    if not isinstance(part, dict):
        return None
    known = cast("Json", part)
    kind = known.get("type")
    if kind in _IMAGES:
        return _image(known)
    return _file(known) if kind in _FILES else None


def text_part(text: str) -> TextPart:
    return {"type": "text", "text": text}


def content_of(parts: Iterable[Part], between: str = "") -> Content:
    """The content of a message. Texts side by side become one, with `between` between them."""
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


def joined(first: Content | None, second: Content | None) -> Content:
    """Two contents as that of one message."""
    return content_of([*_parts(first), *_parts(second)])


def has_attachments(content: Content | None) -> bool:
    return isinstance(content, list)


def _image(part: Json) -> list[Part] | None:
    given = part.get("image_url", part.get("source"))
    url = given if isinstance(given, str) else _source_url(given)
    if url is None:
        return None
    return [{"type": "image", "url": url, "detail": part.get("detail") or _object(part, "image_url").get("detail")}]


def _source_url(source: Any) -> str | None:
    if not isinstance(source, dict):
        return None
    known = cast("Json", source)
    if known.get("type") == "base64":
        return f"data:{known.get('media_type')};base64,{known.get('data')}"
    url = known.get("url")
    return url if isinstance(url, str) else None


def _file(part: Json) -> list[Part] | None:
    if part.get("type") == "document":
        return _document(part)
    given = _object(part, "file") if part.get("type") == "file" else part
    name, data, url = given.get("filename"), given.get("file_data"), given.get("file_url")
    if isinstance(data, str) and not data.startswith("data:"):
        kind = mimetypes.guess_type(name)[0] if isinstance(name, str) else None
        data = f"data:{kind or 'application/pdf'};base64,{data}"
    where = data if isinstance(data, str) else url
    return [_file_part(where, name)] if isinstance(where, str) else None


def _document(part: Json) -> list[Part] | None:
    """Anthropic's. One that is text already is told as text, below its title."""
    source, title = _object(part, "source"), part.get("title")
    heading = [text_part(text) for text in (title, part.get("context")) if isinstance(text, str)]
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return _told([*heading, text_part(source["data"])])
    if source.get("type") == "content":
        return _told([*heading, *_within(source.get("content"))])
    url = _source_url(source)
    return None if url is None else [_file_part(url, title)]


def _within(content: Any) -> list[Part]:
    """What a document of blocks holds: texts and images."""
    if isinstance(content, str):
        return [text_part(content)]
    parts: list[Part] = []
    for block in cast("list[Any]", content) if isinstance(content, list) else ():
        if not isinstance(block, dict):
            continue
        known = cast("Json", block)
        if known.get("type") in _IMAGES:
            parts += _image(known) or ()
        elif isinstance(text := known.get("text"), str):
            parts.append(text_part(text))
    return parts


def _told(parts: list[Part]) -> list[Part]:
    content = content_of(parts, "\n")
    return [text_part(content)] if isinstance(content, str) else content


def _file_part(url: str, name: Any) -> FilePart:
    return {"type": "file", "url": url, "name": name if isinstance(name, str) else None}


def _object(part: Mapping[str, Any], name: str) -> Json:
    value = part.get(name)
    return cast("Json", value) if isinstance(value, dict) else {}


# -- writing -----------------------------------------------------------------------------------------------------------


def as_chat(content: Content) -> str | list[Json]:
    """The content of a message for chat completions. Raises UnsupportedContentError for a file that is named by its
    address."""
    return content if isinstance(content, str) else [_chat_part(part) for part in _parts(content)]


def as_blocks(content: Content) -> list[Json]:
    """The content of a message for Anthropic's messages; nothing of an empty text."""
    return [_block(part) for part in _parts(content)]


def as_items(content: Content) -> str | list[Json]:
    """The content of a message, or the output of a call, for OpenAI's responses."""
    return content if isinstance(content, str) else [_item_part(part) for part in _parts(content)]


def as_text(content: Content, where: str) -> str:
    """The content of what holds text only. Raises UnsupportedContentError for any other."""
    if isinstance(content, str):
        return content
    raise UnsupportedContentError(f"{where} holds an image or a file, which this provider takes of a user only")


def without(content: Content) -> tuple[str, list[Json]]:
    """(the text alone, each image and file as chat completions has it). Raises UnsupportedContentError as `as_chat`
    does."""
    parts = _parts(content)
    words = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(words), [_chat_part(part) for part in parts if part["type"] != "text"]


def _parts(content: Content | None) -> list[Part]:
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return [part for part in content or () if part["type"] != "text" or part["text"]]


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
            f"the file {url!r} is named by its address, which chat completions cannot be given; send it"
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
    """The text of a file that is one; None for any other."""
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
