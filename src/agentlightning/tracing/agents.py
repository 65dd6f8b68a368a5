"""`track_agent`: names the agent whose spans and model calls follow."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from agentlightning.errors import ConfigError
from agentlightning.tracing import client_headers
from agentlightning.tracing.scope import agent_scope


@contextmanager
def track_agent(name: str) -> Generator[None]:
    """Spans within the block carry `gen_ai.agent.name`, the unit of selective optimisation. So do model calls made
    within it, with any HTTP client.

        >>> with agl.track_agent("writer"):
        ...     agl.emit_message("a draft")
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"track_agent({name!r}): the name is a non-empty string")
    client_headers.install()
    with agent_scope(name):
        yield
