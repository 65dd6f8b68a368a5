"""The tokens of one answer with their log-probabilities, handed out once each to the pieces of a stream.

An engine that tells log-probabilities as it draws lets each piece carry those of its own tokens; with one that tells
them at the end, the ending carries all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import Sample

TopLogprobs = tuple[tuple[int, float], ...]
"""(token, log-probability), likeliest first."""
Token = tuple[int, float, TopLogprobs]
"""A token drawn, its log-probability, and the likeliest ones at its place where they were asked for."""


@dataclass(slots=True)
class TokenLogprobs:
    """What is known so far."""

    _tokens: list[Token] = field(default_factory=list[Token])
    _sample: Sample | None = None
    _event_ends: deque[int] = field(default_factory=deque[int])
    """For each piece that was shown and not yet written, how many tokens there were by then."""
    _written: int = 0

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs], pieces: int
    ) -> None:
        """More tokens, after which so many pieces were shown."""
        self._tokens += [
            (token, value, top or ()) for token, value, top in zip_longest(token_ids, logprobs, tops[: len(token_ids)])
        ]
        self._event_ends += [len(self._tokens)] * pieces

    def complete(self, sample: Sample) -> None:
        """Know the whole answer."""
        self._sample = sample

    @property
    def tokens(self) -> list[Token]:
        """All that are known."""
        if self._sample is not None:  # Few callers ask, so nothing was put together before.
            sample, self._sample = self._sample, None
            tops = sample.top_logprobs or ((),) * len(sample.token_ids)
            whole = zip(sample.token_ids, sample.logprobs, tops, strict=True)
            self._tokens += list(whole)[len(self._tokens) :]
        return self._tokens

    def take_event(self) -> list[Token]:
        """Those that the next piece to be written shows."""
        return self._take(self._event_ends.popleft()) if self._event_ends else []

    def take_rest(self) -> list[Token]:
        """Those that no piece has shown."""
        self._event_ends.clear()
        return self._take(len(self.tokens))

    def _take(self, end: int) -> list[Token]:
        taken, self._written = self._tokens[self._written : end], end
        return taken


def token_logprobs(chat: ChatFormat, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities and the likeliest ones at their places where they were asked for, as chat
    completions and responses show them."""
    return [
        _token(chat, token, value) | {"top_logprobs": [_token(chat, *other) for other in top]}
        for token, value, top in tokens
    ]


def _token(chat: ChatFormat, token: int, logprob: float) -> dict[str, Any]:
    text = chat.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
