"""Images and files on their way through readers that know text only.

One is put into the text of its message, marked, before a dialect reads the request, and taken out again where the
message is sent to a provider. So a conversation that is kept holds its images, and two that differ in one differ. What
only its provider can find, by an id, is left as it is: the reader refuses it by name. Pure.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

Part = dict[str, Any]

_START: Final = "\ue000image "
_END: Final = "\ue001"
"""Of the private use area: they stand in no text that means anything to anybody else."""
_MARK: Final = re.compile(f"{_START}([^{_END}]*){_END}")
_IMAGES: Final = ("image", "image_url", "input_image")
_FILES: Final = ("document", "file", "input_file")
_OF_RESPONSES: Final = ("input_image", "input_file")


def hide(value: Any) -> Any:
    """A request with each image and file as text. What is none is left as it is, but for text that looks like one of
    ours; nothing is changed in place."""
    if isinstance(value, list):
        return [hide(each) for each in cast("list[Any]", value)]
    if isinstance(value, str) and _START in value:
        return value.replace(_START, _START[1:])  # A page that an agent read must not become an image that is fetched.
    if not isinstance(value, dict):
        return value
    known = cast("Part", value)
    kind = known.get("type")
    text = None
    if kind in _IMAGES:
        text = _hidden_image(known)
    elif kind in _FILES:
        text = _hidden_file(known)
    if text is not None:
        return {"type": "input_text" if kind in _OF_RESPONSES else "text", "text": text}
    return {key: hide(inner) for key, inner in known.items()}


def has_attachments(text: str) -> bool:
    return any(isinstance(part, dict) for part in _parts(text))


def as_chat(text: str) -> str | list[Part]:
    """The content of a message for chat completions. Raises ValueError for a file that is named by its address, for
    which there is no word."""
    parts = _parts(text)
    return [_chat_part(part) for part in parts] if any(isinstance(part, dict) for part in parts) else text


def as_blocks(text: str) -> list[Part]:
    """The content of a message for Anthropic's messages; nothing of an empty text."""
    return [_block(part) for part in _parts(text)]


def as_items(text: str) -> str | list[Part]:
    """The content of a message, or the output of a call, for OpenAI's responses."""
    parts = _parts(text)
    return [_item_part(part) for part in parts] if any(isinstance(part, dict) for part in parts) else text


def without(text: str) -> tuple[str, list[Part]]:
    """(the text alone, each image and file as chat completions has it). Raises ValueError as `as_chat` does."""
    parts = _parts(text)
    words = [part for part in parts if isinstance(part, str)]
    return "\n".join(words), [_chat_part(part) for part in parts if isinstance(part, dict)]


# -- into the text ---------------------------------------------------------------------------------------------------


def _marked(known: Part) -> str:
    return f"{_START}{orjson.dumps(known).decode()}{_END}"


def _hidden_image(part: Part) -> str | None:
    url = _image_url(part)
    if url is None:
        return None
    detail = part.get("detail") or _object(part, "image_url").get("detail")
    return _marked({"url": url, "detail": detail})


def _image_url(part: Part) -> str | None:
    """Where an image is; its bytes as a data URL."""
    given = part.get("image_url", part.get("source"))
    return given if isinstance(given, str) else _source_url(given)


def _source_url(source: Any) -> str | None:
    if not isinstance(source, dict):
        return None
    known = cast("Part", source)
    if known.get("type") == "base64":
        return f"data:{known.get('media_type')};base64,{known.get('data')}"
    url = known.get("url")
    return url if isinstance(url, str) else None


def _hidden_file(part: Part) -> str | None:
    if part.get("type") == "document":
        return _hidden_document(part)
    given = _object(part, "file") if part.get("type") == "file" else part
    name, data, url = given.get("filename"), given.get("file_data"), given.get("file_url")
    if isinstance(data, str) and not data.startswith("data:"):
        kind = mimetypes.guess_type(name)[0] if isinstance(name, str) else None
        data = f"data:{kind or 'application/pdf'};base64,{data}"
    where = data if isinstance(data, str) else url
    return _marked({"file": where, "name": name}) if isinstance(where, str) else None


def _hidden_document(part: Part) -> str | None:
    """Anthropic's. One that is text already is told as text, below its title."""
    source, title = _object(part, "source"), part.get("title")
    heading = [title] if isinstance(title, str) else []
    heading += [context] if isinstance(context := part.get("context"), str) else []
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return "\n".join([*heading, source["data"]])
    if source.get("type") == "content":
        content = source.get("content")
        if isinstance(content, str):
            return "\n".join([*heading, content])
        texts = [each.get("text") for each in hide(content or []) if isinstance(each, dict)]
        return "\n".join([*heading, *(text for text in texts if isinstance(text, str))])
    url = _source_url(source)
    return None if url is None else _marked({"file": url, "name": title})


def _object(part: Mapping[str, Any], name: str) -> Part:
    value = part.get(name)
    return cast("Part", value) if isinstance(value, dict) else {}


# -- out of the text -------------------------------------------------------------------------------------------------


def _parts(text: str) -> list[str | Part]:
    """Texts, images and files, in order. Readers put lines between the parts of a message: none is left beside one."""
    parts: list[str | Part] = []
    start = 0
    for found in _MARK.finditer(text) if _START in text else ():
        if (part := _known(found[1])) is None:
            continue
        parts += [words] if (words := text[start : found.start()].strip("\n")) else []
        parts.append(part)
        start = found.end()
    rest = text[start:].strip("\n") if start else text
    return [*parts, rest] if rest else parts


def _known(marked: str) -> Part | None:
    """What a mark holds; None for text that only looks like one."""
    try:
        found = orjson.loads(marked)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    part = cast("Part", found)
    return part if isinstance(part.get("url", part.get("file")), str) else None


def _chat_part(part: str | Part) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if "url" in part:
        return {"type": "image_url", "image_url": {key: value for key, value in part.items() if value is not None}}
    url, name = part["file"], part.get("name")
    if not url.startswith("data:"):
        raise ValueError(f"the file {url!r} is named by its address, which chat completions cannot be given; send it")
    if (text := _text_of(url)) is not None:
        return {"type": "text", "text": f"{name}\n{text}" if name else text}
    return {"type": "file", "file": {"filename": name or f"document{_suffix(url)}", "file_data": url}}


def _item_part(part: str | Part) -> Part:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if "url" in part:
        return {"type": "input_image", "image_url": part["url"], "detail": part.get("detail") or "auto"}
    url, name = part["file"], part.get("name")
    if not url.startswith("data:"):
        return {"type": "input_file", "file_url": url}
    return {"type": "input_file", "filename": name or f"document{_suffix(url)}", "file_data": url}


def _block(part: str | Part) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if "url" in part:
        return {"type": "image", "source": _source(part["url"])}
    url: str = part["file"]
    title = {"title": part["name"]} if part.get("name") else {}
    if (text := _text_of(url)) is not None:
        return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}} | title
    return {"type": "document", "source": _source(url)} | title


def _source(url: str) -> Part:
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
