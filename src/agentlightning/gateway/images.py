"""Images on their way through readers that know text only.

An image is put into the text of its message, marked, before a dialect reads the request, and taken out again where the
message is sent to a provider. So a conversation that is kept holds its images, and two that differ in an image differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

_START: Final = "\ue000image "
_END: Final = "\ue001"
"""Of the private use area: they stand in no text that means anything to anybody else."""
_MARK: Final = re.compile(f"{_START}([^{_END}]*){_END}")
_KINDS: Final = ("image", "image_url", "input_image")


def hide(value: Any) -> Any:
    """A request with each image as text. What is no image is left as it is, and nothing is changed in place."""
    if isinstance(value, list):
        return [hide(each) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    known = cast("dict[str, Any]", value)
    if known.get("type") in _KINDS and (url := _url(known)) is not None:
        detail = known.get("detail") or (known["image_url"].get("detail") if _is_object(known, "image_url") else None)
        marked = orjson.dumps({"url": url, "detail": detail}).decode()
        kind = "input_text" if known["type"] == "input_image" else "text"
        return {"type": kind, "text": f"{_START}{marked}{_END}"}
    return {key: hide(inner) for key, inner in known.items()}


def has_images(text: str) -> bool:
    return any(isinstance(part, dict) for part in _parts(text))


def as_chat(text: str) -> str | list[dict[str, Any]]:
    """The content of a message for chat completions."""
    parts = _parts(text)
    return [_chat_part(part) for part in parts] if any(isinstance(part, dict) for part in parts) else text


def as_blocks(text: str) -> list[dict[str, Any]]:
    """The content of a message for Anthropic's messages; nothing of an empty text."""
    return [_block(part) for part in _parts(text)]


def without(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(the text alone, each image as chat completions has it)."""
    parts = _parts(text)
    words = [part for part in parts if isinstance(part, str)]
    return "\n".join(words), [_chat_part(part) for part in parts if isinstance(part, dict)]


def _url(part: Mapping[str, Any]) -> str | None:
    """Where an image is; its bytes as a data URL. None for one that only its provider can find."""
    given = part.get("image_url", part.get("source"))
    if isinstance(given, str):
        return given
    if not isinstance(given, dict):
        return None
    source = cast("dict[str, Any]", given)
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    url = source.get("url")
    return url if isinstance(url, str) else None


def _is_object(part: Mapping[str, Any], name: str) -> bool:
    return isinstance(part.get(name), dict)


def _parts(text: str) -> list[str | dict[str, Any]]:
    """Texts and images, in order. Readers put lines between the parts of a message: none is left beside an image."""
    parts: list[str | dict[str, Any]] = []
    start = 0
    for found in _MARK.finditer(text) if _START in text else ():
        if (image := _image(found[1])) is None:
            continue
        parts += [words] if (words := text[start : found.start()].strip("\n")) else []
        parts.append(image)
        start = found.end()
    rest = text[start:].strip("\n") if start else text
    return [*parts, rest] if rest else parts


def _image(marked: str) -> dict[str, Any] | None:
    """What a mark holds; None for text that only looks like one."""
    try:
        found = orjson.loads(marked)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or not isinstance(cast("dict[str, Any]", found).get("url"), str):
        return None
    return cast("dict[str, Any]", found)


def _chat_part(part: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {key: value for key, value in part.items() if value is not None}}


def _block(part: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url: str = part["url"]
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    head, _, data = url[len("data:") :].partition(",")
    source = {"type": "base64", "media_type": head.partition(";")[0], "data": data}
    return {"type": "image", "source": source}
