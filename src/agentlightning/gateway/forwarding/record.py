"""The record of a call that a provider answers: the request as it was sent, and the response as it was read."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning import span as names
from agentlightning.gateway.answer import PENDING, Answer, Json, ProviderResponse
from agentlightning.gateway.dialects.base import ApiPath
from agentlightning.gateway.dialects.output_constraint import Constraint
from agentlightning.gateway.dialects.raw_request import (
    OPERATIONS,
    distribution_changes,
    input_messages,
    num_choices,
    request_attributes,
)
from agentlightning.gateway.dialects.registry import DIALECTS
from agentlightning.gateway.record import CallRecord, failure_of, output_attributes
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.failures import display_text
from agentlightning.span import Span

BACKGROUND: Final = "background_response"
"""Operation of the span of a call that its provider answers later."""
UNFINISHED: Final = "unfinished_answer"
"""Type of the error of an answer without an end: the provider broke it off, or does not say why it ended."""


@dataclass(slots=True, kw_only=True)
class ProviderRecord(CallRecord):
    """Makes the spans of one request to a provider and its response."""

    name: str = ""
    path: ApiPath
    route: ModelRoute
    data: Json
    """The request."""
    forced: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the attempt's resources say of the sampling, whatever the agent asks for."""
    extra_attributes: Json = field(default_factory=dict[str, Any])
    """Attributes of every span, which replace those read from the request and the response."""
    constraint: Constraint | None = None
    """What the caller demands of the answer, if that is known."""
    span_id: str = field(default="", init=False)
    """Of its first span, once it has one."""
    response: ProviderResponse = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{OPERATIONS[self.path]} {self.route.name}"
        self.response = DIALECTS[self.path].response()

    @property
    def is_pending(self) -> bool:
        """Whether polls bring the answer: its provider works on it in the background, even if its stream broke."""
        reasons = {choice.given_reason for choice in self.response.choices.values()}
        if not PENDING.isdisjoint(reasons):
            return True
        is_cut = self.response.id and not self.response.error and not any(reasons)
        return self.path == "responses" and self.data.get("background") is True and bool(is_cut)

    def spans(self, of_call: Json) -> list[Span]:
        """One span for each choice; the first has the cost of the call. `of_call` are `UpstreamCall.attributes`."""
        response = self.response
        choices = [response.choices[index] for index in sorted(response.choices)] or [Answer()]
        shared = self._attributes() | of_call
        spans: list[Span] = []
        for choice in choices:
            attributes = shared | self._choice_attributes(choice)
            if spans:
                attributes.pop(names.COST, None)
                if not choice.token_ids:
                    attributes.pop(names.OUTPUT_TOKENS, None)
            spans.append(self._choice_span(choice, attributes))
        self.span_id = spans[0].span_id
        return spans

    def failed_span(self, of_call: Json, error: BaseException) -> Span:
        """The span of a call that failed, with the response up to then. It has no tokens: nothing is learned from
        it."""
        choice = self.response.choices.get(0) or Answer()
        choice.take_new(done=True)
        attributes = self._attributes() | of_call
        attributes |= output_attributes(choice, "error" if choice.is_finished else choice.recorded_reason)
        attributes[names.INPUT_MESSAGES] = input_messages(self.path, self.data)
        if self.is_pending:
            attributes[names.OPERATION_NAME] = BACKGROUND
        span = self.span(attributes, failure_of(error))
        self.span_id = span.span_id
        return span

    def _choice_span(self, choice: Answer, attributes: Json) -> Span:
        """What is not finished is a failure, unless polls will bring the answer: then the span is no model call, since
        theirs will be."""
        if self.response.error:
            return self.span(attributes, ("provider_error", self._redacted(self.response.error)))
        if choice.is_finished or self.path == "embeddings":
            return self.span(attributes)
        if self.is_pending:
            return self.span(attributes | {names.OPERATION_NAME: BACKGROUND}, status="UNSET")
        reason = self._redacted(choice.recorded_reason)
        return self.span(attributes, (UNFINISHED, f"the provider did not finish its answer: {reason}"))

    def _redacted(self, text: str) -> str:
        """A provider's text without its secrets."""
        return display_text(self.route.provider, text) if self.route.provider else text

    def _choice_attributes(self, choice: Answer) -> Json:
        messages = input_messages(self.path, self.data, choice.index // num_choices(self.data))
        attributes: Json = {names.INPUT_MESSAGES: messages}
        if self.path == "embeddings":
            return attributes
        choice.take_new(done=True)
        attributes |= output_attributes(choice, choice.recorded_reason, self.constraint)
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

    def _attributes(self) -> Json:
        response, model = self.response, self.data.get("model")
        attributes: Json = {
            names.OPERATION_NAME: OPERATIONS[self.path],
            names.REQUEST_MODEL: model if isinstance(model, str) else self.route.name,
            names.RESPONSE_MODEL: response.model or self.route.send_model,
            **request_attributes({**self.data, **self.forced} if self.forced else self.data),
        }
        if response.id:
            attributes[names.RESPONSE_ID] = response.id
        return attributes | self.extra_attributes


def _are_numbers(prompt: Any, token_ids: Any, logprobs: Any) -> bool:
    """Whether the token ids and log-probabilities of a provider are numbers of the recorded types."""
    try:
        _ = array("i", prompt), array("i", token_ids), array("f", logprobs)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
