"""What a provider answers, as typed events, the same for every dialect and for whole answers and streams.

One reader for each wire format makes them (`openai.chat_events`, `openai.responses_events`, `anthropic.events`). Spans,
translation and usage are all made of these events, so that each answer is parsed once. Readers
skip what they do not know, and raise on malformed JSON structures after the events that came before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from msgspec import Struct

from agentlightning.gateway.dialects.output import ReasoningDelta, RefusalDelta

Json = dict[str, Any]

MALFORMED: Final = (AttributeError, KeyError, TypeError, ValueError, IndexError)
"""What readers raise on JSON that is not structured as its format says."""
FINISH_REASONS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Reasons for the end of an answer in other dialects -> their names in chat completions."""


class Usage(Struct, frozen=True):
    """Tokens of one call, as its provider counted them."""

    input_tokens: int = 0
    """The whole prompt, including `cached_tokens`."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens read from the provider's cache."""
    written_tokens: int = 0
    """Prompt tokens written to the provider's cache for minutes, at a price of their own."""
    written_hour_tokens: int = 0
    """Prompt tokens written to the provider's cache for an hour."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.written_tokens + other.written_tokens,
            self.written_hour_tokens + other.written_hour_tokens,
        )


class ResponseStart(Struct):
    """The id and the model of an answer, as far as an event names them."""

    id: Any
    model: Any


class TextDelta(Struct):
    """More content of one choice."""

    text: str
    choice: int = 0


class ToolCallFragment(Struct):
    """A tool call or a part of one. Fragments of one `place` belong together, and may be interleaved with others."""

    place: Any
    id: Any
    name: Any
    arguments: Any
    """A part of the JSON text, or the whole object."""
    choice: int = 0


class ToolCallDone(Struct):
    """A tool call is complete."""

    place: Any


class BlockDone(Struct):
    """A complete content block or output item as its provider wrote it."""

    block: Json


class SampledTokens(Struct):
    """Tokens of one choice and their log-probabilities, from providers that report them."""

    choice: int | None = 0
    """None: of all choices, which share their prompt."""
    prompt_token_ids: Any = None
    token_ids: Any = None
    logprobs: Any = None
    entries: list[Json] = []
    """Log-probabilities with the text of each token, as chat completions shows them."""


class Finish(Struct):
    """The end of one choice."""

    reason: str | None
    """One of chat completions' names where there is one; None: not given."""
    stop_string: str | None = None
    choice: int = 0


class UsageReport(Struct):
    """What the answer used, and the details that other dialects report; None: not given."""

    usage: Usage
    cached_tokens: Any = None
    cache_write_tokens: Any = None
    reasoning_tokens: Any = None


class ProviderFailure(Struct):
    """The provider reports an error instead of an answer, or in the middle of one."""

    message: Any


ProviderEvent = (
    ResponseStart
    | TextDelta
    | RefusalDelta
    | ReasoningDelta
    | ToolCallFragment
    | ToolCallDone
    | BlockDone
    | SampledTokens
    | Finish
    | UsageReport
    | ProviderFailure
)


Emit = Callable[[ProviderEvent], None]


def counted(*counts: Any) -> Usage:
    """Usage with everything that is no positive number as 0."""
    return Usage(*(count if isinstance(count, int) and count > 0 else 0 for count in counts))


def choice_index(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def logprob_entries(listed: Any) -> list[Json]:
    """The well-formed entries of a list of log-probabilities."""
    entries = cast("Iterable[Any]", listed or ())
    return [cast("Json", entry) for entry in entries if isinstance(entry, dict) and "logprob" in entry]
