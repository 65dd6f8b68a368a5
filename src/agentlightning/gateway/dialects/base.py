"""What every dialect does: it reads a request into one shape, and writes our answers back as its SDK expects them.

A dialect knows its wire and nothing else. Whose call it is, what the engine is given and what is recorded are the
business of those who call it. A new dialect is one module that fills in a `Dialect`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.dialects.content import AnswerView, OutputEvent
from agentlightning.gateway.dialects.output_constraint import Constraint
from agentlightning.gateway.dialects.provider_events import UsageReport
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError

Body = bytes | dict[str, Any]
"""The body of a request, as it came or parsed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, understood."""

    model: str | None
    params: SamplingParams
    messages: list[Message] = field(default_factory=list[Message])
    """The conversation; empty where the request has `prompts`."""
    prompts: tuple[str | list[int], ...] = ()
    """Raw prompts, as text or as token ids: each is answered `n` times."""
    tools: list[dict[str, Any]] | None = None
    forbidden_tools: list[dict[str, Any]] | None = None
    """Tools it names and forbids to call (`tool_choice` none): an engine is shown none of them."""
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    constraint: Constraint = field(default_factory=Constraint)
    num_instructions: int = 0
    """How many of the first messages belong to this request only, and not to the conversation a later one names."""
    prefill: str = ""
    """What the answer begins with: the caller has written it, and wants the rest."""
    token_ids: bool = False
    """The reply is to hold the tokens, as vLLM's does (`return_token_ids`)."""
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables for the chat template."""
    uses_functions: bool = False
    """Calls are told as they were before tools (`dialects.legacy`)."""
    ignored_fields: tuple[str, ...] = ()
    """Names of fields that were ignored."""
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The request as it came."""


@dataclass(slots=True)
class ReplyMetadata:
    """What is known of a reply before its first token."""

    id: str
    model: str
    created: int
    """Seconds since the epoch."""
    prompt_tokens: int
    """Of all prompts, each counted once; a provider says it with the last of its answer."""
    cached_tokens: int | None = None
    """Of the prompt, those a provider had in its cache; None: nobody said."""
    cache_write_tokens: int | None = None
    """Of the prompt, those a provider put into its cache; None: nobody said."""
    reasoning_tokens: int | None = None
    """Of the answer, those of a provider's thoughts; None: nobody said."""

    def add_usage(self, report: UsageReport) -> None:
        """Take the counts that a provider reports beside its usage."""
        self.cached_tokens = _count(report.cached_tokens, self.cached_tokens)
        self.cache_write_tokens = _count(report.cache_write_tokens, self.cache_write_tokens)
        self.reasoning_tokens = _count(report.reasoning_tokens, self.reasoning_tokens)


def _count(given: Any, before: int | None) -> int | None:
    return given if type(given) is int and 0 <= given < 2**53 else before


class ReplyWriter(Protocol):
    """Writes the reply to one request: `whole`, or else `opening`, `piece`... and `ending`."""

    def body(self, answers: Sequence[AnswerView]) -> bytes:
        """The reply as one object."""
        ...

    def start(self, answers: Sequence[AnswerView]) -> bytes:
        """The events before the first piece."""
        ...

    def event(self, answer: AnswerView, piece: OutputEvent) -> bytes:
        """The events that show one more piece of an answer."""
        ...

    def end(self, answers: Sequence[AnswerView]) -> bytes:
        """The events after the last piece of the last answer: why each ended, and what was used."""
        ...


class Read(Protocol):
    """Reads a request."""

    def __call__(self, body: Body, recall: ResponseLookup, attachments: bool = False) -> Request:
        """May be called from any thread. `attachments`: images and files become parts of the messages
        (`gateway.attachments`); else they are refused.
        Raises ApiError 400, naming the field, on what is not a request or cannot be honoured."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One wire format."""

    operation: Literal["chat", "text_completion"]
    """OTel's name for what it does."""
    id_prefix: str
    """What the ids of its replies begin with."""
    call_prefix: str
    """What the ids of its tool calls begin with."""
    read: Read
    reply: Callable[[Request, ReplyMetadata], ReplyWriter]
    error_body: Callable[[ApiError], bytes]
    """The body of an error reply."""
    error_event: Callable[[ApiError], bytes]
    """A failure after the stream has begun."""


def num_output_tokens(answers: Sequence[AnswerView]) -> int:
    """Tokens of all answers."""
    return sum(answer.num_tokens for answer in answers)
