"""`emit_*`: what an agent says of itself, one span for each call."""

from agentlightning.tracing.emit.actions import emit_step, emit_tool_call
from agentlightning.tracing.emit.events import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
)
from agentlightning.tracing.emit.model_calls import emit_completion, emit_prompt, emit_response

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
]
