"""`emit_*`: what an agent says of itself, one span for each call."""

from agentlightning.tracing.emit.events import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
)

__all__ = ["emit_annotation", "emit_exception", "emit_message", "emit_object", "emit_reward"]
