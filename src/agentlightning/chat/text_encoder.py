"""Text to tokens with a Hugging Face tokenizer, and a lower bound on the number of tokens.

Long texts are encoded without the interpreter lock, so that other threads are not blocked. `min_token_count` detects
early that a text is too long: it encodes piece by piece and stops at a limit, so that a prompt of 20 MB costs no more
than one that just fits.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

LONG: Final = 4096
"""Characters from which a text is encoded without the lock; for shorter texts, releasing it costs more."""
PIECE: Final = 32 * 1024
"""Characters encoded at once when tokens are only counted."""
_SLACK: Final = 16
"""The most tokens that a cut between two pieces adds."""
_PROBE: Final = "x \n\t  y\n\n\n z"


class TextEncoder:
    """Wraps a tokenizer of transformers, and the Rust tokenizer inside if there is one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    @property
    def backend(self) -> Any | None:
        """The Rust tokenizer. Calling it directly takes half the time for a short text."""
        return self._backend

    def encode(self, text: str) -> list[int]:
        """Special tokens are recognised, none is added."""
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        if len(text) < LONG:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def min_token_count(self, text: str, limit: int) -> int:
        """A lower bound, exact enough to tell whether `text` has more than `limit` tokens, at the cost of encoding no
        more than that. 0 for a text with too few characters."""
        if len(text) <= limit:
            return 0
        bound = len(text) // self._max_token_length if self._max_token_length else 0
        if bound > limit:
            return bound
        count, position = 0, 0
        while position < len(text) and count <= limit:
            end = _piece_end(text, position)
            count += max(0, len(self.encode(text[position:end])) - _SLACK)
            position = end
        return count

    @cached_property
    def _max_token_length(self) -> int:
        """Characters of the longest token, with a margin for normalisation; 0 if whitespace may vanish, so that the
        number of characters bounds nothing."""
        if _PROBE not in cast("str", self._tokenizer.decode(self.encode(_PROBE))):
            return 0
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        return longest if self._backend is not None and self._backend.normalizer is None else 4 * longest


def _piece_end(text: str, start: int) -> int:
    """End of the piece from `start`: between two words, if there are any."""
    end = start + PIECE
    if end >= len(text):
        return len(text)
    space = text.rfind(" ", start + PIECE // 2, end)
    return space if space > 0 else end
