"""What an agent does becomes spans of its attempt: `scope` (which attempt), `emit` (what is said), `tracer` (how it
travels), `otel` (its form)."""

from agentlightning.tracing.emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    operation,
)
from agentlightning.tracing.scope import track_agent

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_reward_value",
    "operation",
    "track_agent",
]
