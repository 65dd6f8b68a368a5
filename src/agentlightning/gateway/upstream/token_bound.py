"""Estimates the prompt tokens of a request without a tokenizer, from its bytes.

An upper bound (`max_prompt_tokens`) is reserved from budgets and rate limits; a likely number
(`estimate_prompt_tokens`) answers clients that ask for a token count. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from operator import mul
from typing import Any, Final, cast

import orjson

from agentlightning.gateway.dialects.content_parts import object_of
from agentlightning.tracing.messages import IMAGES, image_url
from agentlightning.util.json_values import Json, dumps, loads

BYTES_PER_TOKEN: Final = 2
"""Lower bound for text: most tokens have three or four bytes."""
BYTES_PER_AUDIO_TOKEN: Final = 32
"""Lower bound for audio in base64: the tightest encodings have a kilobyte per second, and no provider counts more
than 32 tokens for it."""
_IMAGES: Final = frozenset({*IMAGES, "computer_screenshot"})


def max_prompt_tokens(body: bytes, image_tokens: int) -> int:
    """An upper bound for a prompt in any dialect: one token for two bytes of text, `image_tokens` for each image,
    inline or not, and one token for 32 bytes of audio. Other files count as text."""
    if b"image" not in body and b"input_audio" not in body:
        return len(body) // BYTES_PER_TOKEN
    try:
        request = loads(body)
    except orjson.JSONDecodeError:
        return len(body) // BYTES_PER_TOKEN
    images, image_bytes, audio_bytes = 0, 0, 0
    for part in _walk(request):
        if isinstance(part, str):
            continue
        if (size := _image_bytes(part)) is not None:
            images += 1
            image_bytes += size
        elif part.get("type") == "input_audio":
            audio_bytes += _length(object_of(part, "input_audio").get("data"))
    text = max(0, len(body) - image_bytes - audio_bytes)
    return text // BYTES_PER_TOKEN + images * image_tokens + audio_bytes // BYTES_PER_AUDIO_TOKEN


def _walk(value: Any, skipped: Container[str] = ()) -> Iterator[str | Json]:
    """The texts and objects of nested JSON, without those below `skipped` names or in images."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += cast("list[Any]", value)
        elif isinstance(value, dict):
            part = cast(Json, value)
            yield part
            if _image_bytes(part) is None:
                left += [inner for name, inner in part.items() if name not in skipped]


def _image_bytes(part: Json) -> int | None:
    """Bytes of an inline image, 0 for one given by its address; None if it is no image."""
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _IMAGES:
        return None
    if kind == "image":  # JSON schemas use this word as well.
        source = part.get("source")
        return _length(cast(Json, source).get("data")) if isinstance(source, dict) else None
    url = image_url(part)
    return len(url) if url is not None and url.startswith("data:") else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


# -- likely number -----------------------------------------------------------------------------------------------------

_TOKENS_PER_CHARACTER: Final = (1 / 3.5, 0.6, 1.15, 2.0)
"""By the length of the character in UTF-8: English and code; accents, Greek, Cyrillic; Chinese, Japanese, Korean;
emoji. Against OpenAI's cl100k: English 12% too high, Python 27%, German 3%, Russian 33%; Chinese exact, JSON 5% too
low. Bytes / 3.5 would be simpler, but 25% too low for Chinese, so that clients would shorten conversations too late."""
_TOKENS_PER_MESSAGE: Final = 4
"""Tokens that a chat template adds to a message."""
_TOKENS_PER_IMAGE: Final = 1600
_BYTES_PER_FILE_TOKEN: Final = 20
"""For files in base64."""
_FILES: Final = frozenset({"data", "file_data", "encrypted_content"})
_NOT_CONTENT: Final = _FILES | {
    *("type", "role", "id", "tool_use_id", "tool_call_id", "call_id", "signature", "media_type"),
    *("input", "cache_control"),
}


def estimate_prompt_tokens(body: Mapping[str, Any]) -> int:
    """An estimate for a prompt in any dialect: its system prompt, messages or items, and tools. Rather too high than
    too low, since agents shorten their conversations by it."""
    messages = body.get("messages", body.get("input"))
    tokens = sum(_content_tokens(part) for part in (body.get("system"), body.get("instructions"), messages))
    if body.get("tools"):
        tokens += _text_tokens(_dumped(body["tools"]))
    count = len(cast("list[Any]", messages)) if isinstance(messages, list) else 0
    return math.ceil(tokens) + count * _TOKENS_PER_MESSAGE


def _content_tokens(value: Any) -> float:
    """The tokens of nested content."""
    tokens = 0.0
    for part in _walk(value, _NOT_CONTENT):
        if isinstance(part, str):
            tokens += _text_tokens(part)
        elif _image_bytes(part) is not None:
            tokens += _TOKENS_PER_IMAGE
        else:
            if part.get("type") == "tool_use":
                tokens += _text_tokens(_dumped(part.get("input")))
            tokens += sum(_length(part[name]) for name in _FILES & part.keys()) / _BYTES_PER_FILE_TOKEN
    return tokens


def _text_tokens(text: str) -> float:
    """By the number of characters with one, two, three and four bytes in UTF-8, counted without a loop."""
    if text.isascii():
        return len(text) * _TOKENS_PER_CHARACTER[0]
    one = len(text.encode("ascii", "ignore"))
    four = len(text.encode("utf-16-le", "surrogatepass")) // 2 - len(text)
    rest = len(text) - one - four
    three = len(text.encode("utf-8", "surrogatepass")) - one - 4 * four - 2 * rest
    return sum(map(mul, _TOKENS_PER_CHARACTER, (one, rest - three, three, four)))


def _dumped(value: Any) -> str:
    return dumps(value).decode()
