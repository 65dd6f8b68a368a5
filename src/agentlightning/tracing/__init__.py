"""Records what an agent does as spans of its attempt: the current scope, `emit_*`, the tracer and OTLP."""

from agentlightning.tracing.emit import (
    emit_annotation,
    emit_completion,
    emit_exception,
    emit_message,
    emit_object,
    emit_prompt,
    emit_response,
    emit_reward,
    emit_step,
    emit_tool_call,
    operation,
    track_agent,
)
from agentlightning.tracing.rewards import find_final_reward, find_reward_spans, get_reward_value

__all__ = [
    "emit_annotation",
    "emit_completion",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_prompt",
    "emit_response",
    "emit_reward",
    "emit_step",
    "emit_tool_call",
    "find_final_reward",
    "find_reward_spans",
    "get_reward_value",
    "operation",
    "track_agent",
]
