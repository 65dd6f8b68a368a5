"""Assigns the tokens of an answer and their log-probabilities to the events of a stream, each once.

If the engine streams log-probabilities, each event carries those of its own tokens; otherwise the last event carries
all.
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
"""(token, log-probability), most likely first."""
Token = tuple[int, float, TopLogprobs]
"""A sampled token, its log-probability, and the most likely tokens at its position if requested."""


@dataclass(slots=True)
class TokenLogprobs:
    """The tokens so far, and which of them are written."""

    _tokens: list[Token] = field(default_factory=list[Token])
    _sample: Sample | None = None
    _event_ends: deque[int] = field(default_factory=deque[int])
    """For each event not yet written, the number of tokens at that point."""
    _written: int = 0

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs], num_events: int
    ) -> None:
        """Add tokens, and the number of events they produced."""
        self._tokens += [
            (token, value, top or ()) for token, value, top in zip_longest(token_ids, logprobs, tops[: len(token_ids)])
        ]
        self._event_ends += [len(self._tokens)] * num_events

    def complete(self, sample: Sample) -> None:
        """Set the complete sample."""
        self._sample = sample

    @property
    def tokens(self) -> list[Token]:
        """All tokens so far."""
        if self._sample is not None:  # Built on demand: few callers request log-probabilities.
            sample, self._sample = self._sample, None
            tops = sample.top_logprobs or ((),) * len(sample.token_ids)
            whole = zip(sample.token_ids, sample.logprobs, tops, strict=True)
            self._tokens += list(whole)[len(self._tokens) :]
        return self._tokens

    def take_event(self) -> list[Token]:
        """The tokens of the next event to be written."""
        return self._take(self._event_ends.popleft()) if self._event_ends else []

    def take_rest(self) -> list[Token]:
        """The tokens that belong to no event."""
        self._event_ends.clear()
        return self._take(len(self.tokens))

    def _take(self, end: int) -> list[Token]:
        taken, self._written = self._tokens[self._written : end], end
        return taken


def token_logprobs(chat: ChatFormat, tokens: Sequence[Token], most: int) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities and at most `most` of the most likely alternatives, in the wire format of
    chat completions and responses."""
    return [
        _token(chat, token, value) | {"top_logprobs": [_token(chat, *other) for other in top[:most]]}
        for token, value, top in tokens
    ]


def _token(chat: ChatFormat, token: int, logprob: float) -> dict[str, Any]:
    text = chat.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
