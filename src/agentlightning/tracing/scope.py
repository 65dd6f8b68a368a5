"""Which rollout am I in, who is speaking, and where do spans go.

Whoever runs an agent enters `scope(...)` around it; everything the agent emits inside, in the same thread, in tasks it
starts and in `asyncio.to_thread`, then belongs to that attempt. Bare threads inherit no context, and nothing is guessed
for them: a reward given to the wrong attempt is worse than one dropped with a warning.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from agentlightning.errors import ConfigError
from agentlightning.rollouts import trace_id_of
from agentlightning.span import Span, new_trace_id


class SpanSink(Protocol):
    """What takes finished spans on their way to the store."""

    def put(self, spans: Sequence[Span]) -> None:
        """Take the spans over, in order. Called in whatever thread ended them, often inside an event loop: it never
        blocks and never raises. A span emitted before another one is put before it."""
        ...


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Scope:
    """One attempt, as seen by the code that runs inside it."""

    rollout_id: str
    attempt_id: str
    sink: SpanSink
    agent: str | None = None
    """Who speaks where `track_agent` names nobody."""
    trace_id: str = field(default_factory=new_trace_id, kw_only=True)
    """The trace that spans without a parent belong to: 32 hexadecimal digits."""
    address: str = field(default="", kw_only=True)
    """Where this attempt's server is (`http://host:port`); calls that go there say whose they are."""
    key: str = field(default="", kw_only=True, repr=False)
    """The attempt's key."""


_scope: ContextVar[Scope | None] = ContextVar("agentlightning_scope", default=None)
_agent: ContextVar[str | None] = ContextVar("agentlightning_agent", default=None)


def current_scope() -> Scope | None:
    """The attempt this code runs in; None outside of any."""
    return _scope.get()


def current_agent() -> str | None:
    """Who is speaking: the innermost `track_agent`, else the scope's own agent."""
    tracked = _agent.get()
    if tracked is not None:
        return tracked
    inside = current_scope()
    return None if inside is None else inside.agent


@contextmanager
def scope(
    rollout_id: str, attempt_id: str, sink: SpanSink, agent: str | None = None, *, address: str = "", key: str = ""
) -> Generator[Scope]:
    """What is emitted inside belongs to this attempt and goes to `sink`. Calls to the server at `address` are known
    by the attempt's `key` (see `outbound.py`)."""
    trace_id = trace_id_of(attempt_id) or new_trace_id()
    inside = Scope(rollout_id, attempt_id, sink, agent, trace_id=trace_id, address=address.rstrip("/"), key=key)
    token = _scope.set(inside)
    try:
        yield inside
    finally:
        _scope.reset(token)


@cache
def _install_outbound() -> None:
    from agentlightning.tracing import outbound  # it reads the scope

    outbound.install()


@contextmanager
def track_agent(name: str) -> Generator[None]:
    """Spans inside carry `gen_ai.agent.name`: who is speaking, and the unit of selective optimisation. So do the
    model calls made inside, by whatever client."""
    if not name:
        raise ConfigError("track_agent('') names nobody; give the agent a name")
    _install_outbound()
    token = _agent.set(name)
    try:
        yield
    finally:
        _agent.reset(token)
