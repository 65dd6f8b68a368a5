"""Makes the spans of a local call: one for each answer, with its exact tokens and how they were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning import span as names
from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.engine.likeliest_tokens import likeliest_to_text
from agentlightning.gateway.callers.replay import RecordedAnswer
from agentlightning.gateway.dialects.output_constraint import Constraint
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.conversation import Prompt
from agentlightning.gateway.recording.otel_messages import chat_message
from agentlightning.span import Span
from agentlightning.util.json_values import dumps


@dataclass(frozen=True, slots=True)
class SpanDraft:
    """The part of an answer's span that is known before sampling."""

    rollout_id: str
    attempt_id: str
    trace_id: str
    parent_id: str | None
    caller_attributes: dict[str, Any]
    """Who made the call (`Caller.attributes`)."""
    operation: str
    """OpenTelemetry's name for the operation."""
    response_id: str
    requested_model: str
    served_model: str
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None
    prompt: Prompt
    constraint: Constraint
    start_time: float
    span_id: str
    overridden: tuple[str, ...] = ()
    """Sampling parameters of the request that were overridden for training."""
    recorded: RecordedAnswer | None = None
    """What is given again: a whole answer, or its beginning, which is then the end of the prompt."""
    replay_mismatch: bool = False
    """The request differs from the recorded ones."""
    turn_limit: int | None = None
    """The number of answers that the attempt may be given, if it is limited."""

    def answered(self, answer: Answer, params: SamplingParams, end_time: float) -> Span:
        """The span of a complete answer."""
        sample = answer.sample
        if sample is None:
            raise ValueError("the answer has no sample yet")
        attributes = self._attributes(answer, params) | {
            names.FINISH_REASONS: [answer.finish_reason],
            names.OUTPUT_TOKENS: len(sample.token_ids),
            names.OUTPUT_MESSAGES: _output(answer, answer.finish_reason),
            names.PROMPT_TOKEN_IDS: self.prompt.token_ids,
            names.RESPONSE_TOKEN_IDS: list(sample.token_ids),
            names.LOGPROBS: list(sample.logprobs),
            names.POLICY_VERSION: sample.policy_version,
        }
        if sample.versions:
            attributes[names.POLICY_VERSIONS] = [number for run in sample.versions for number in run]
        if sample.kept_sets is not None:
            attributes[names.KEPT_SETS] = sample.kept_sets.to_text()
        if sample.top_logprobs:
            attributes[names.TOP_LOGPROBS] = likeliest_to_text(sample.top_logprobs)
        if self.constraint:
            verdict, violations = self.constraint.evaluate(answer)
            attributes |= {names.CONSTRAINT: verdict} | ({names.VIOLATIONS: violations} if violations else {})
        return self._span(attributes, end_time, "OK", None)

    def failed(self, answer: Answer, params: SamplingParams, end_time: float, type: str, message: str) -> Span:
        """The span of an answer that failed, with the tokens sampled so far. It is not trained on."""
        attributes = self._attributes(answer, params) | {
            names.OUTPUT_TOKENS: answer.num_tokens,
            names.OUTPUT_MESSAGES: _output(answer, "error"),
            names.ERROR_TYPE: type,
        }
        if answer.num_tokens:
            attributes |= {
                names.PROMPT_TOKEN_IDS: self.prompt.token_ids,
                names.RESPONSE_TOKEN_IDS: list(answer.token_ids),
            }
        return self._span(attributes, end_time, "ERROR", message)

    def _span(self, attributes: dict[str, Any], end_time: float, status: str, message: str | None) -> Span:
        return Span(
            rollout_id=self.rollout_id,
            attempt_id=self.attempt_id,
            name=f"{self.operation} {self.served_model}",
            start_time=self.start_time,
            end_time=end_time,
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_id=self.parent_id,
            status_code=status,
            status_message=message,
            attributes=attributes,
        )

    def _attributes(self, answer: Answer, params: SamplingParams) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            names.OPERATION_NAME: self.operation,
            names.PROVIDER_NAME: "agentlightning",
            names.REQUEST_MODEL: self.requested_model,
            names.RESPONSE_MODEL: self.served_model,
            names.RESPONSE_ID: self.response_id,
            names.REQUEST_TEMPERATURE: params.temperature,
            names.REQUEST_TOP_P: params.top_p,
            names.REQUEST_TOP_K: params.top_k,
            names.INPUT_TOKENS: len(self.prompt.token_ids),
            names.INPUT_MESSAGES: _json([chat_message(message) for message in self.messages]),
        }
        optional = {
            names.REQUEST_MAX_TOKENS: params.max_tokens,
            names.REQUEST_SEED: params.seed,
            names.REQUEST_STOP: list(params.stop) or None,
            names.REQUEST_PRESENCE_PENALTY: params.presence_penalty or None,
            names.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty or None,
            names.OVERRIDDEN: list(self.overridden) or None,
            names.RESHAPED: list(params.distribution_params) or None,
            names.TOOL_DEFINITIONS: _json(list(self.tools)) if self.tools else None,
            names.REPLAYS: None if self.recorded is None else self.recorded.replays,
            names.BEGUN: None if self.recorded is None else len(self.recorded.begun) or None,
            names.REPLAY_MISMATCH: self.replay_mismatch or None,
            names.TURN_LIMIT: self.turn_limit,
            names.CONTINUES: self.prompt.continued_span,
            names.DRIFT: self.prompt.drift or None,
            names.DRIFT_REASON: self.prompt.reason,
        }
        return (
            attributes | self.caller_attributes | {name: value for name, value in optional.items() if value is not None}
        )


def _output(answer: Answer, reason: str) -> str:
    # OpenTelemetry's finish reason of a message is singular.
    message = chat_message(answer.message) | {"finish_reason": "tool_call" if reason == "tool_calls" else reason}
    return _json([message])


def _json(value: Any) -> str:
    return dumps(value).decode()
