"""What a dry run has seen of one rollout: its calls, their tokens, its tools, its reward."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentlightning import span as names
from agentlightning.assemble.agent_steps import steps
from agentlightning.assemble.model_calls import calls, has_failed, is_call, model_of, untrainable_calls
from agentlightning.span import Span
from agentlightning.training.sources.group_rewards import transcript_of

TOOL_ERROR: Final = re.compile(r"^\W*(error|exception|traceback|an error occurred)\b", re.IGNORECASE)
"""How frameworks begin the result of a tool that raised; the model is given it in place of a result."""
MOST_TEXT: Final = 300
"""Characters of an error that are shown."""


@dataclass(frozen=True, slots=True)
class DryRunRollout:
    """One rollout of a dry run."""

    rollout_id: str
    task: Any
    status: str
    """That of its attempt: succeeded, failed, timeout ..."""
    seconds: float
    output: Any = None
    """What the agent returned."""
    reward: float | None = None
    """None: it has failed, or has no usable reward."""
    failure: str | None = None
    """The traceback of the agent; None where it ended well."""
    rejection: str | None = None
    """Why nothing can be learned from it although it ended well."""
    reason: str | None = None
    """The short name of that."""
    policy_calls: int = 0
    """Calls that the policy answered."""
    other_models: tuple[str, ...] = ()
    """Models of others that answered calls."""
    failed_calls: tuple[str, ...] = ()
    """Errors of the calls that were not answered."""
    without_tokens: int = 0
    """Calls whose tokens are not known."""
    sampled_tokens: int = 0
    truncated: int = 0
    """Answers that were cut off at their token limit."""
    tool_errors: tuple[str, ...] = ()
    """`NAME: error` of each tool that raised."""
    transcript: tuple[Mapping[str, Any], ...] = ()
    """The messages of its last call, and the answer."""


def observe_calls(spans: Sequence[Span], model: str | None) -> dict[str, Any]:
    """The fields of an observed rollout that its spans tell. `model`: the name of the policy; None: any counts."""
    answered = calls(spans)
    own = [span for span in answered if model is None or model_of(span) in (None, model)]
    return {
        "policy_calls": len(own),
        "other_models": tuple(sorted({model_of(span) or "?" for span in answered if span not in own})),
        "failed_calls": tuple(_error(span) for span in spans if is_call(span) and has_failed(span)),
        "without_tokens": len(untrainable_calls(own)),
        "sampled_tokens": sum(len(span.attributes.get(names.RESPONSE_TOKEN_IDS) or ()) for span in own),
        "truncated": sum("length" in (span.attributes.get(names.FINISH_REASONS) or ()) for span in own),
        "tool_errors": _tool_errors(spans),
        "transcript": transcript_of(spans),
    }


def _error(span: Span) -> str:
    text = span.status_message or span.attributes.get(names.EXCEPTION_MESSAGE) or span.attributes.get(names.ERROR_TYPE)
    return str(text or "error")[:MOST_TEXT]


def _tool_errors(spans: Sequence[Span]) -> tuple[str, ...]:
    """Of recorded tool calls; and of the results that the model was given, which say it in words."""
    recorded = [f"{step.name}: {step.error}"[:MOST_TEXT] for step in steps(spans) if step.kind == "tool" and step.error]
    if recorded:
        return tuple(recorded)
    named = {
        str(part.get("id")): str(part.get("name"))
        for message in transcript_of(spans)
        for part in _parts(message)
        if part.get("type") == "tool_call"
    }
    return tuple(
        f"{named.get(str(part.get('id')), 'tool')}: {text.strip()}"[:MOST_TEXT]
        for message in transcript_of(spans)
        for part in _parts(message)
        if part.get("type") == "tool_call_response" and TOOL_ERROR.match(text := _result(part))
    )


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [part for part in message.get("parts") or () if isinstance(part, Mapping)]


def _result(part: Mapping[str, Any]) -> str:
    return str(part.get("response", part.get("result", part.get("content", ""))))
