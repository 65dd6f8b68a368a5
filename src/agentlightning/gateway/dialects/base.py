"""The contract of a dialect: it reads requests into a `Request`, writes answers as its official SDK expects them, and
reads what providers answer.

A dialect knows its wire format and nothing else: not who calls, not what the engine samples from, not what is recorded.
A new dialect is one module that makes a `Dialect`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.answer import Answer, Event, ProviderResponse, Usage
from agentlightning.gateway.dialects.output_constraint import Constraint
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError
from agentlightning.util.json_values import Json

ApiPath = Literal["chat/completions", "completions", "responses", "embeddings", "messages"]
"""Paths of the API that are model calls."""
Body = bytes | Json
"""The body of a request, as received or parsed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, in terms that all dialects share."""

    model: str | None
    params: SamplingParams
    messages: list[Message] = field(default_factory=list[Message])
    """The conversation; empty if the request has `prompts`."""
    prompts: tuple[str | list[int], ...] = ()
    """Raw prompts, as text or as token ids, each of which gets `n` answers."""
    tools: list[Json] | None = None
    forbidden_tools: list[Json] | None = None
    """Tools that must not be called (`tool_choice` none). An engine is not shown them; a provider is."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools whose input is free text: `tools` has them as functions (`answer.CUSTOM_INPUT`)."""
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    constraint: Constraint = field(default_factory=Constraint)
    num_instructions: int = 0
    """How many of the first messages belong to this request alone, and not to the conversation that later ones
    continue."""
    prefill: str = ""
    """The beginning of the answer, written by the caller, who wants the rest."""
    token_ids: bool = False
    """The reply includes the token ids, as vLLM's does (`return_token_ids`)."""
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables for the chat template."""
    ignored_fields: tuple[str, ...] = ()
    """Names of the fields that were ignored."""
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The request as received."""


@dataclass(slots=True)
class ReplyMetadata:
    """What the header of a reply says, before its first token."""

    id: str
    model: str
    created: int
    """Seconds since the epoch."""
    usage: Usage = Usage()  # noqa: RUF009 - it is frozen
    """Of all prompts, each counted once. A provider reports it at the end of its answer. `num_output_tokens` tells the
    output."""


class ReplyWriter(Protocol):
    """Writes the reply to one request: either `body`, or `start`, `event` for each event, and `end`."""

    def body(self, answers: Sequence[Answer]) -> bytes:
        """The reply as one object."""
        ...

    def start(self, answers: Sequence[Answer]) -> bytes:
        """The stream up to the first event."""
        ...

    def event(self, answer: Answer, event: Event) -> bytes:
        """One more event of an answer."""
        ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The stream after the last event: why each answer ended, and the usage."""
        ...


class ReadRequest(Protocol):
    """Reads a request."""

    def __call__(self, body: Body, recall: ResponseLookup, attachments: bool = False) -> Request:
        """Thread-safe. With `attachments`, images and files become parts of the messages (`content_parts`); otherwise
        they are rejected. Raises ApiError 400, naming the field, for a body that is no request or asks for what is not
        supported."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One wire format."""

    id_prefix: str
    """Prefix of the ids of replies."""
    call_prefix: str
    """Prefix of the ids of tool calls."""
    read: ReadRequest
    reply: Callable[[Request, ReplyMetadata], ReplyWriter]
    response: type[ProviderResponse]
    """Reads what a provider answers."""
    error_body: Callable[[ApiError], bytes]
    """The body of an error reply."""
    error_event: Callable[[ApiError], bytes]
    """An error in the middle of a stream."""
    ping: bytes = b": keep-alive\n\n"
    """What is sent while a stream is silent; the official SDKs skip it."""


def num_output_tokens(answers: Sequence[Answer]) -> int:
    """Sampled tokens of all answers."""
    return sum(answer.num_tokens for answer in answers)
