"""How many tokens a request has, before anybody has counted them.

Two estimates: what it has at most, which is set aside of a budget and of a rate, and about how many, for who asks.
Both are made of bytes, as a provider's tokenizer is not known here. Called by `gateway.sending` for each call whose
tokens are reckoned with, and by `gateway.count`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from agentlightning.gateway.dialects.content_parts import IMAGE_TYPES

BYTES_OF_TOKEN: Final = 2
"""Of text, at the least: most has three or four."""
BYTES_OF_SOUND_TOKEN: Final = 32
"""Of sound in base64, at the least: the tightest encodings have a kilobyte a second, and nobody counts more than 32
tokens for that."""
_IMAGES: Final = frozenset({*IMAGE_TYPES, "computer_screenshot"})


def max_prompt_tokens(body: bytes, image_tokens: int) -> int:
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
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _IMAGES:
        return None
    if kind == "image":  # A word that schemas use as well.
        source = part.get("source")
        return _length(_inner(source, "data")) if isinstance(source, dict) else None
    url = part.get("image_url")
    url = _inner(url, "url") if isinstance(url, dict) else url
    return _length(url) if isinstance(url, str) and url.startswith("data:") else 0


def _inner(value: Any, name: str) -> Any:
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


# -- for who asks ------------------------------------------------------------------------------------------------------

_TOKENS_OF_CHARACTER: Final = (1 / 3.5, 0.6, 1.15, 2.0)
"""By its length in UTF-8: English and code; accents, Greek, Cyrillic; Chinese, Japanese, Korean; emoji. Beside OpenAI's
cl100k: English 12% too many, Python 27%, German 3%, Russian 33%; Chinese right, JSON 5% too few."""
_TOKENS_OF_MESSAGE: Final = 4
"""What stands around a message where it is rendered."""
_TOKENS_OF_IMAGE: Final = 1600
_BYTES_OF_FILE_TOKEN: Final = 20
"""In base64."""
_NOT_TEXT: Final = frozenset(
    {"type", "role", "id", "tool_use_id", "tool_call_id", "call_id", "signature", "media_type"}
)
_FILES: Final = frozenset({"data", "file_data", "encrypted_content"})


def estimate_prompt_tokens(asked: Mapping[str, Any]) -> int:
    """About how many tokens a prompt has, in any dialect of messages or items, where nobody can say: its system prompt,
    messages and tools. Rather too many than too few, as agents shorten their conversations by it."""
    messages = asked.get("messages", asked.get("input"))
    tally = _Tally()
    for part in (asked.get("system"), asked.get("instructions"), messages):
        tally.read(part)
    if asked.get("tools"):
        tally.add(_dumped(asked["tools"]))
    count = len(cast("list[Any]", messages)) if isinstance(messages, list) else 0
    return math.ceil(tally.tokens) + count * _TOKENS_OF_MESSAGE


class _Tally:
    """What was read so far."""

    def __init__(self) -> None:
        self.tokens = 0.0

    def add(self, text: str) -> None:
        one, two, three, four = _lengths(text)
        of_one, of_two, of_three, of_four = _TOKENS_OF_CHARACTER
        self.tokens += one * of_one + two * of_two + three * of_three + four * of_four

    def read(self, value: Any) -> None:
        """Whatever stands in a message."""
        left = [value]
        while left:
            value = left.pop()
            if isinstance(value, str):
                self.add(value)
            elif isinstance(value, list):
                left += cast("list[Any]", value)
            elif isinstance(value, dict):
                left += self._part(cast("dict[str, Any]", value))

    def _part(self, part: dict[str, Any]) -> list[Any]:
        """What of it is left to read."""
        if _picture(part) is not None:
            self.tokens += _TOKENS_OF_IMAGE
            return []
        if part.get("type") == "tool_use":
            self.add(_dumped(part.get("input")))
        files = [_length(part[name]) for name in _FILES & part.keys()]
        self.tokens += sum(files) / _BYTES_OF_FILE_TOKEN
        return [inner for name, inner in part.items() if name not in _NOT_TEXT | _FILES | {"input", "cache_control"}]


def _lengths(text: str) -> tuple[int, int, int, int]:
    """How many of its characters have one, two, three and four bytes in UTF-8; found without looking at each."""
    if text.isascii():
        return len(text), 0, 0, 0
    one = len(text.encode("ascii", "ignore"))
    four = len(text.encode("utf-16-le", "surrogatepass")) // 2 - len(text)
    rest = len(text) - one - four
    three = len(text.encode("utf-8", "surrogatepass")) - one - 4 * four - 2 * rest
    return one, rest - three, three, four


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()
