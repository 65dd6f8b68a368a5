"""Fakes for tests of agents and algorithms: engines and servers that need no model."""

from agentlightning.testing.scripted_engine import ByteChatFormat, ScriptedEngine, read_chatml
from agentlightning.testing.scripted_server import ScriptedServer

__all__ = ["ByteChatFormat", "ScriptedEngine", "ScriptedServer", "read_chatml"]
