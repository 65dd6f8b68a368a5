"""Spans of a call that a provider answered in its own dialect.

An exchange is the request, whose call it is, and the response as it was read. `spans` and `failed_span` make its spans.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning import span as names
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.dialects.provider_events import PENDING
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.recording.otel_messages import (
    OPERATIONS,
    as_json,
    distribution_changes,
    input_messages,
    request_attributes,
)
from agentlightning.gateway.recording.provider_response import ProviderAnswer, ProviderResponse
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.failures import display_text
from agentlightning.gateway.upstream.provider import ApiPath
from agentlightning.span import Span, new_span_id

Json = dict[str, Any]

BACKGROUND: Final = "background_response"
"""Operation of the span of a call that its provider answers later."""
UNFINISHED: Final = "unfinished_answer"
"""Type of the error of an answer without an end: the provider broke it off, or does not say why it ended."""


@dataclass(slots=True)
class ForwardedExchange:
    """One request to a provider and its response."""

    path: ApiPath
    route: ModelRoute
    caller: Caller
    data: Json
    """The request."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the request, by lower-case name."""
    trace_id: str = ""
    forced: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the attempt's resources say of the sampling, whatever the agent asks for."""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    extra_attributes: Json | None = field(default=None, kw_only=True)
    """Attributes of every span, which replace those read from the request and the response."""
    span_id: str = field(default="", init=False)
    """Of its first span, once it has one."""
    response: ProviderResponse = field(init=False)

    def __post_init__(self) -> None:
        self.response = ProviderResponse(self.path)

    @property
    def is_pending(self) -> bool:
        """Whether polls bring the answer: its provider works on it in the background, even if its stream broke."""
        reasons = {choice.given_reason for choice in self.response.choices.values()}
        if not PENDING.isdisjoint(reasons):
            return True
        is_cut = self.response.id and not self.response.error and not any(reasons)
        return self.path == "responses" and self.data.get("background") is True and bool(is_cut)

    def spans(self, of_call: Json, now: float) -> list[Span]:
        """One span for each choice; the first has the cost of the call. `of_call` are `UpstreamCall.attributes`."""
        response = self.response
        choices = [response.choices[index] for index in sorted(response.choices)] or [ProviderAnswer()]
        shared = self._attributes() | of_call
        spans: list[Span] = []
        for choice in choices:
            attributes = shared | self._choice_attributes(choice) | choice.extra_attributes
            if spans:
                attributes.pop(names.COST, None)
                if not choice.token_ids:
                    attributes.pop(names.OUTPUT_TOKENS, None)
            spans.append(self._span(attributes, now, *self._status(choice, attributes)))
        self.span_id = spans[0].span_id
        return spans

    def _status(self, choice: ProviderAnswer, attributes: Json) -> tuple[str, str | None]:
        """(status, message) of the span of a choice. What is not finished is a failure, unless polls will bring the
        answer: then the span is no model call, since theirs will be."""
        if self.response.error:
            return "ERROR", self._redacted(self.response.error)
        if choice.is_finished or self.path == "embeddings":
            return "OK", None
        if self.is_pending:
            attributes[names.OPERATION_NAME] = BACKGROUND
            return "UNSET", None
        attributes[names.ERROR_TYPE] = UNFINISHED
        return "ERROR", f"the provider did not finish its answer: {self._redacted(choice.recorded_reason)}"

    def _redacted(self, text: str) -> str:
        """A provider's text without its secrets."""
        return display_text(self.route.provider, text) if self.route.provider else text

    def _choice_attributes(self, choice: ProviderAnswer) -> Json:
        messages = input_messages(self.path, self.data, choice.index // num_choices(self.data))
        attributes: Json = {names.INPUT_MESSAGES: messages}
        if self.path == "embeddings":
            return attributes
        attributes[names.OUTPUT_MESSAGES] = as_json([choice.recorded_message(choice.recorded_reason)])
        attributes[names.FINISH_REASONS] = [choice.recorded_reason]
        prompt = choice.prompt_token_ids or self.response.prompt_token_ids
        token_ids, logprobs = choice.token_ids, choice.logprobs
        if not (
            choice.is_finished
            and prompt
            and token_ids
            and logprobs
            and len(token_ids) == len(logprobs)
            and _are_numbers(prompt, token_ids, logprobs)
        ):
            return attributes | {names.TOKENS: "none"}
        if changed := distribution_changes({**self.data, **self.forced}):
            attributes[names.RESHAPED] = changed
        return attributes | {
            names.TOKENS: "provider",
            names.OUTPUT_TOKENS: len(token_ids),
            names.PROMPT_TOKEN_IDS: prompt,
            names.RESPONSE_TOKEN_IDS: token_ids,
            names.LOGPROBS: logprobs,
        }

    def failed_span(self, of_call: Json, error: BaseException) -> Span:
        """The span of a call that failed, with the response up to then. It has no tokens: nothing is learned from
        it."""
        cancelled = isinstance(error, asyncio.CancelledError)
        if cancelled and error.args and isinstance(error.args[0], ApiError):  # its attempt has ended
            error, cancelled = error.args[0], False
        kind = "client_disconnected" if cancelled else getattr(error, "code", None) or type(error).__qualname__
        message = "the caller hung up before the answer was whole" if cancelled else str(error)
        choice = self.response.choices.get(0) or ProviderAnswer()
        reason = "error" if choice.is_finished else choice.recorded_reason
        attributes = self._attributes() | of_call
        attributes[names.FINISH_REASONS] = [reason]
        attributes[names.ERROR_TYPE] = kind
        attributes[names.INPUT_MESSAGES] = input_messages(self.path, self.data)
        attributes[names.OUTPUT_MESSAGES] = as_json([choice.recorded_message(reason)])
        if self.is_pending:
            attributes[names.OPERATION_NAME] = BACKGROUND
        span = self._span(attributes, time.time(), "ERROR", message)
        self.span_id = span.span_id
        return span

    def _attributes(self) -> Json:
        response, model = self.response, self.data.get("model")
        attributes: Json = {
            names.OPERATION_NAME: OPERATIONS[self.path],
            names.REQUEST_MODEL: model if isinstance(model, str) else self.route.name,
            names.RESPONSE_MODEL: response.model or self.route.send_model,
            **request_attributes({**self.data, **self.forced} if self.forced else self.data),
            **self.caller.attributes(),
        }
        if response.id:
            attributes[names.RESPONSE_ID] = response.id
        return attributes | self.extra_attributes if self.extra_attributes else attributes

    def _span(self, attributes: Json, end_time: float, status: str, message: str | None) -> Span:
        caller = self.caller
        return Span(
            rollout_id=caller.rollout_id or "",
            attempt_id=caller.attempt_id or "",
            name=f"{OPERATIONS[self.path]} {self.route.name}",
            start_time=self.started,
            end_time=end_time,
            trace_id=caller.trace_id or self.trace_id,
            span_id=new_span_id(),
            parent_id=caller.parent_id,
            status_code=status,
            status_message=message,
            attributes=attributes,
        )


def num_choices(request: Json) -> int:
    """How many answers a request asks for to each of its prompts."""
    several = request.get("n")
    return max(1, several) if isinstance(several, int) else 1


def _are_numbers(prompt: Any, token_ids: Any, logprobs: Any) -> bool:
    """Whether the token ids and log-probabilities of a provider are numbers of the recorded types."""
    try:
        _ = array("i", prompt), array("i", token_ids), array("f", logprobs)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
