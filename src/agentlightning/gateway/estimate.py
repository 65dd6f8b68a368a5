"""How many tokens a request may have, before anybody has counted them: what is set aside of a budget and of a rate.

Rather too high than too low, and made of bytes, as a provider's tokenizer is not known here. Called by
`gateway.backends` for each call whose tokens are reckoned with. Pure.
"""

from __future__ import annotations

from typing import Any, Final, cast

import orjson

BYTES_OF_TOKEN: Final = 2
"""Of text, at the least: most has three or four."""
BYTES_OF_SOUND_TOKEN: Final = 32
"""Of sound in base64, at the least: the tightest encodings have a kilobyte a second, and nobody counts more than 32
tokens for that."""
_IMAGES: Final = frozenset({"image_url", "input_image", "image", "computer_screenshot"})


def most_tokens(body: bytes, image_tokens: int) -> int:
    """Of a prompt in any dialect: a token for every two bytes, `image_tokens` for each image wherever it is kept, and
    one for every 32 bytes of sound. Files that are no images count as text."""
    if b"image" not in body and b"input_audio" not in body:
        return len(body) // BYTES_OF_TOKEN
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        return len(body) // BYTES_OF_TOKEN
    images, pictured, sound = _look(asked)
    text = max(0, len(body) - pictured - sound)
    return text // BYTES_OF_TOKEN + images * image_tokens + sound // BYTES_OF_SOUND_TOKEN


def _look(asked: Any) -> tuple[int, int, int]:
    """(images, their bytes in base64, bytes of sound in base64) of a request."""
    images, pictured, sound = 0, 0, 0
    left = [asked]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += cast("list[Any]", value)
        elif isinstance(value, dict):
            part = cast("dict[str, Any]", value)
            if (found := _picture(part)) is not None:
                images += 1
                pictured += found
            elif part.get("type") == "input_audio":
                sound += _length(_inner(part.get("input_audio"), "data"))
            else:
                left += part.values()
    return images, pictured, sound


def _picture(part: dict[str, Any]) -> int | None:
    """Bytes of an image that is sent along, 0 of one that is fetched; None where it is no image."""
    if part.get("type") not in _IMAGES:
        return None
    if part["type"] == "image":  # A word that schemas use as well.
        source = part.get("source")
        return _length(_inner(source, "data")) if isinstance(source, dict) else None
    url = part.get("image_url")
    url = _inner(url, "url") if isinstance(url, dict) else url
    return _length(url) if isinstance(url, str) and url.startswith("data:") else 0


def _inner(value: Any, name: str) -> Any:
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0
