"""Escaping of special tokens in message text, so that a prompt cannot inject turns.

`<|im_end|>` in a user's message, a tool result or a description is text. Encoded with the rendered prompt it would
become the real token, and whoever can write into a prompt could end a turn and begin another. So `escape_messages`
replaces each such text by a placeholder before rendering, and `encode` encodes the original text with a tokenizer
without special tokens. Placeholders contain a random number of this process that nobody outside can know; templates,
slices and comparisons treat them like any other word.

Escaped are special tokens and everything the template writes around turns; in an assistant's content only the latter,
because a model's own markers (of thoughts, of calls) may occur there. Paired tags such as `<think>` and `</think>`
begin no turn and are not escaped.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

from agentlightning.chat.base import Message
from agentlightning.chat.tool_calls.format import Tools
from agentlightning.util.json_values import dumps

Encode = Callable[[str], list[int]]

_NONCE = f"agl{secrets.token_hex(12)}x"
_PLACEHOLDER = re.compile(_NONCE + r"(\d+)q")
_PREFIX = 2
"""Length of the marker prefixes used for a quick test that a text contains no marker."""


class TokenEscaper:
    """Escapes texts for one tokenizer. `encode` recognises special tokens; `special` are the tokens to escape, `turns`
    those that are escaped in an assistant's content too."""

    def __init__(self, tokenizer: Any, encode: Encode, special: Iterable[str], turns: Collection[str]) -> None:
        self._encode = encode
        self._texts = sorted({*special, *turns}, key=len, reverse=True)
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._anywhere = _pattern(self._texts)
        self._in_answers = _pattern([text for text in self._texts if text in turns])
        self._prefixes = {text[:_PREFIX] for text in self._texts}
        self._tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._added = {token.content: token for token in added.values()}
        self._ids = {number for number, token in added.items() if token.content in self._numbers}
        self._splits = _pattern(sorted(self._added, key=len, reverse=True))
        self._text_encoder: Encode | None = None

    # -- before rendering ------------------------------------------------------------------------------------------

    def escape_messages(self, messages: Sequence[Message], tools: Tools) -> tuple[Sequence[Message], Tools]:
        """Messages and tools with placeholders in place of special tokens."""
        if not self._texts or not self._may_contain_marker([messages, tools]):
            return messages, tools
        return [self._escape_message(message) for message in messages], self._escape_value(tools, self._anywhere)

    def escape(self, text: str) -> str:
        return self._escape_value(text, self._anywhere)

    def _may_contain_marker(self, value: Any) -> bool:
        try:
            data = dumps(value)
        except TypeError:  # Lone surrogates, say.
            return True
        return any(prefix.encode() in data for prefix in self._prefixes)

    def _escape_message(self, message: Message) -> Message:
        own = message.get("role") == "assistant"
        return {
            key: value
            if key == "role"
            else self._escape_value(value, self._in_answers if own and key == "content" else self._anywhere)
            for key, value in message.items()
        }

    def _escape_value(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: f"{_NONCE}{self._numbers[found[0]]}q", value)
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {self._escape_value(key, pattern): self._escape_value(each, pattern) for key, each in items}
        if isinstance(value, list | tuple):
            return [self._escape_value(each, pattern) for each in cast("Sequence[Any]", value)]
        return value

    # -- after rendering -------------------------------------------------------------------------------------------

    def unescape(self, text: str) -> str:
        """Rendered text with the original texts in place of placeholders."""
        return _PLACEHOLDER.sub(lambda found: self._texts[int(found[1])], text) if _NONCE in text else text

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text."""
        if _NONCE not in text:
            return self._encode(text)
        tokens: list[int] = []
        pending = ""
        parts = [*self._splits.split(text), ""]  # Alternately a text and the marker after it.
        for place in range(0, len(parts) - 1, 2):
            written, marker = parts[place : place + 2]
            if _NONCE in written:
                tokens += self._encode(pending) if pending else []
                before = parts[place - 1] if place else None
                tokens += self._encode_text(self._stripped(written, before, marker), first=before is None)
                pending = marker
            else:
                pending += written + marker
        return tokens + (self._encode(pending) if pending else [])

    def _stripped(self, text: str, before: str | None, after: str) -> str:
        """Without the whitespace that belongs to the adjacent markers."""
        if before is not None and before in self._added and self._added[before].rstrip:
            text = text.lstrip()
        return text.rstrip() if after in self._added and self._added[after].lstrip else text

    def _encode_text(self, written: str, *, first: bool) -> list[int]:
        """Encode a text and the originals of its placeholders as ordinary text. `first`: it begins the prompt."""
        encoder = self._text_encoder = self._text_encoder or _text_encoder(self._tokenizer)
        tokens = _encode_after(encoder, self.unescape(written), first)
        if self._ids.isdisjoint(tokens):
            return tokens
        # Some vocabularies contain the text of a marker as a word; split, it is none.
        pieces: list[str] = []
        for place, piece in enumerate(_PLACEHOLDER.split(written)):
            marker = self._texts[int(piece)] if place % 2 else ""
            pieces += [marker[:1], marker[1:]] if marker else [piece]
        found: list[int] = []
        for piece in filter(None, pieces):
            found += _encode_after(encoder, piece, first and not found)
        return found


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    """Pattern of any of the texts, longer ones first; it matches nothing if there are none."""
    return re.compile(f"({'|'.join(map(re.escape, texts))})" if texts else r"((?!))")


def _encode_after(encoder: Encode, text: str, first: bool) -> list[int]:
    """Encode a text as a continuation: some tokenizers encode the start of a text differently, so it follows a token
    that is then dropped."""
    return encoder(text) if first else encoder(_NONCE + text)[1:]


def _text_encoder(tokenizer: Any) -> Encode:
    """The same tokenizer without special tokens, except for one that occurs in no text."""
    from tokenizers import AddedToken, Tokenizer

    described: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    described["added_tokens"], described["post_processor"] = [], None
    bare = Tokenizer.from_str(json.dumps(described))
    bare.add_special_tokens([AddedToken(_NONCE, special=True, normalized=False)])
    return lambda text: bare.encode(text, add_special_tokens=False).ids
