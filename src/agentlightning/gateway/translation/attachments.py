"""Writes the typed parts of a message's content for the wire format of a provider."""

from __future__ import annotations

import base64
import binascii
import mimetypes
from typing import Any

from agentlightning.gateway.dialects.content_parts import Content, Part, non_empty_parts

Json = dict[str, Any]


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
