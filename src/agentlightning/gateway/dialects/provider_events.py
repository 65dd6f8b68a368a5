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
_SYNONYMS: Final = {
    "stop": "end_turn stop_sequence pause_turn eos eos_token end complete completed",
    "length": "max_tokens max_output_tokens model_context_window_exceeded model_length max_length max_new_tokens",
    "tool_calls": "tool_use tool_call function_call",
    "content_filter": "refusal safety sensitive recitation prohibited_content guardrail_intervened",
}
_FINISHED: Final = {name: reason for reason, names in _SYNONYMS.items() for name in (reason, *names.split())}
PENDING: Final = frozenset({"queued", "in_progress"})
"""Statuses of a response that its provider works on in the background: later polls bring the answer."""


def finished_reason(reason: str | None) -> str | None:
    """Chat completions' name for the reason why an answer ended; None for a reason that does not finish an answer
    (`abort`, `network_error`, `queued` ...), for an unknown one and for none."""
    return _FINISHED.get(reason.lower()) if reason else None


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
    """A tool call or a part of one, as its provider marks it. Fragments may be interleaved with those of other calls;
    `ProviderAnswer` finds the call that each belongs to."""

    place: Any
    """The index that the provider gives; a negative one is the place in a list whose entries have none."""
    id: Any
    name: Any
    arguments: Any
    """A part of the JSON text, or the whole object."""
    choice: int = 0
    is_custom: bool = False
    """The arguments are free text: the input of a custom tool."""
    extra: Json | None = None
    """What the provider wants back with the call."""


class ToolCallDone(Struct):
    """A tool call is complete."""

    place: Any
    choice: int = 0


class BlockDone(Struct):
    """A complete content block or output item as its provider wrote it, or what else of a turn it wants back."""

    block: Json
    choice: int = 0


class HostedCall(Struct):
    """A call of a tool that the provider runs itself, or its result, as the provider wrote it."""

    block: Json
    choice: int = 0


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
    """As its provider names it; None: not given."""
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
    | HostedCall
    | SampledTokens
    | Finish
    | UsageReport
    | ProviderFailure
)


Emit = Callable[[ProviderEvent], None]


def emit_text(kind: type[TextDelta | ReasoningDelta | RefusalDelta], text: Any, emit: Emit, choice: int = 0) -> None:
    """Emit a text, if it is one."""
    if isinstance(text, str) and text:
        emit(kind(text, choice))


def counted(*counts: Any) -> Usage:
    """Usage with everything that is no positive number as 0."""
    return Usage(*(count if isinstance(count, int) and count > 0 else 0 for count in counts))


def logprob_entries(listed: Any) -> list[Json]:
    """The well-formed entries of a list of log-probabilities."""
    entries = cast("Iterable[Any]", listed) if isinstance(listed, list) else ()
    return [cast("Json", entry) for entry in entries if isinstance(entry, dict) and "logprob" in entry]
