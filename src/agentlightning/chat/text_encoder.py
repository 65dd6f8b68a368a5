"""Text into tokens for a Hugging Face tokenizer, and how many it will at least be.

Long texts are encoded without the interpreter's lock, so that a thread that does so stops nobody. `least` says early
that a text is too long: it encodes piece by piece and stops at a limit, so that a prompt of 20 MB costs no more than
one that just fits.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

LONG: Final = 4096
"""Characters from which a text is encoded without the lock; below, giving it up costs more."""
PIECE: Final = 32 * 1024
"""Characters encoded at once where tokens are only counted."""
_SLACK: Final = 16
"""Tokens that a cut between two pieces adds at most."""
_PROBE: Final = "x \n\t  y\n\n\n z"


class TextEncoder:
    """Over the tokenizer of transformers, and the Rust one inside where there is one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    @property
    def backend(self) -> Any | None:
        """Called directly, it takes half the time for a short text."""
        return self._backend

    def encode(self, text: str) -> list[int]:
        """Special tokens are recognised, none is added."""
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        if len(text) < LONG:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def least(self, text: str, most: int) -> int:
        """A number of tokens that `text` has at least; exact enough to say whether it has more than `most`, and never
        more work than for that many. 0 for a text that is surely no longer, as its characters are few."""
        if len(text) <= most:
            return 0
        certain = len(text) // self._longest if self._longest else 0
        if certain > most:
            return certain
        count, place = 0, 0
        while place < len(text) and count <= most:
            end = _cut(text, place)
            count += max(0, len(self.encode(text[place:end])) - _SLACK)
            place = end
        return count

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token, with room for what normalisation takes away; 0 where whitespace may vanish,
        so that characters say nothing of tokens."""
        if _PROBE not in cast("str", self._tokenizer.decode(self.encode(_PROBE))):
            return 0
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        return longest if self._backend is not None and self._backend.normalizer is None else 4 * longest


def _cut(text: str, start: int) -> int:
    """Where the piece from `start` ends: between two words, where there are any."""
    end = start + PIECE
    if end >= len(text):
        return len(text)
    space = text.rfind(" ", start + PIECE // 2, end)
    return space if space > 0 else end
