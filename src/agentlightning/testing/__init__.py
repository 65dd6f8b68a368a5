"""Fakes for tests of agents and algorithms: engines, policies and servers that need no model."""

from agentlightning.testing.scripted_engine import ByteChatFormat, ScriptedEngine, read_chatml
from agentlightning.testing.scripted_policy import RecordedUpdate, ScriptedPolicy, scripted_weights

__all__ = [
    "ByteChatFormat",
    "RecordedUpdate",
    "ScriptedEngine",
    "ScriptedPolicy",
    "read_chatml",
    "scripted_weights",
]
