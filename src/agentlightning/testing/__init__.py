"""The fakes we test with, shipped: what stands in for a model, so that tests of agents need none."""

from agentlightning.testing.scripted_engine import ByteChatFormat, ScriptedEngine, read_chatml

__all__ = ["ByteChatFormat", "ScriptedEngine", "read_chatml"]
