"""Which rollout am I in, who is speaking, and where do spans go.

Whoever runs an agent enters `scope(...)` around it; everything the agent emits inside, in the same thread, in tasks it
starts and in `asyncio.to_thread`, then belongs to that attempt. Bare threads inherit no context, and nothing is guessed
for them: a reward given to the wrong attempt is worse than one dropped with a warning.

A scope is inherited, but not for ever: what outlives the attempt is in no scope, and a task or thread that takes work
which another attempt has put into a queue is in none either, until it takes work of its own attempt again
(`runner/propagation.py` follows the queues).

A program that runs for one attempt as a whole, as its environment says (`AGL_EVENT_URL`, `AGL_KEY`), is in the scope
of that attempt wherever no other was entered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, Protocol

from agentlightning.errors import ConfigError
from agentlightning.rollouts import trace_id_of
from agentlightning.span import Span, new_trace_id


class SpanSink(Protocol):
    """What takes finished spans on their way to the store."""

    def put(self, spans: Sequence[Span]) -> None:
        """Take the spans over, in order. Called in whatever thread ended them, often inside an event loop: it never
        blocks and never raises. A span emitted before another one is put before it."""
        ...


@dataclass(slots=True)
class Lifetime:
    """What changes about a scope."""

    certain: bool = True
    """Neither of the following."""
    ended: bool = False
    mixed: bool = False
    """A task or thread that it started handed on work of another attempt in a way that cannot be followed: what was
    inherited from it proves nothing any more."""

    def end(self) -> None:
        self.ended, self.certain = True, False

    def mix(self) -> None:
        self.mixed, self.certain = True, False


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
    role: Literal["agent", "judge"] = field(default="agent", kw_only=True)
    """A judge scores the attempt: its model calls are not the attempt's."""
    lifetime: Lifetime = field(default_factory=Lifetime, kw_only=True, repr=False)


Place = tuple[int, object]
"""A thread and the task that runs in it, or None."""

_scope: ContextVar[Scope | None] = ContextVar("agentlightning_scope", default=None)
_agent: ContextVar[str | None] = ContextVar("agentlightning_agent", default=None)
_main: ContextVar[Place | None] = ContextVar("agentlightning_main", default=None)
"""Where the attempt itself runs. Elsewhere its scope is inherited."""
_work: ContextVar[Scope | None] = ContextVar("agentlightning_work", default=None)
"""The attempt that has put what was last taken from a queue, where the scope is inherited."""


def current_scope() -> Scope | None:
    """The attempt this code runs in; None outside of any."""
    inside = _scope.get()
    if inside is None:
        return process_scope()
    if inside.lifetime.certain and _work.get() is None:  # nearly always
        return inside
    return inside if _holds(inside) else None


def _holds(inside: Scope) -> bool:
    if inside.lifetime.ended:
        return False
    if (work := _work.get()) is not None:
        return work is inside
    return not inside.lifetime.mixed or is_main()


def process_scope() -> Scope | None:
    """The attempt that this whole process runs for, as its environment says; else None."""
    from agentlightning.tracing import process_scope  # it needs what is defined here

    return process_scope.scope_of_environment()


# -- inherited scopes --------------------------------------------------------------------------------------------------


def enter_main() -> None:
    """This task, or this thread outside of any, runs the attempt itself."""
    _main.set(_here())


def is_main() -> bool:
    return _main.get() == _here()


def _here() -> Place:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), task


def origin_of_work() -> Scope | None:
    """The attempt on whose behalf something is put into a queue now; None where that is not known."""
    if (work := _work.get()) is not None:
        return work
    inside = _scope.get()
    return inside if inside is not None and _holds(inside) else None


def take_work(origin: Scope) -> bool:
    """Something that the attempt `origin` has put was taken from a queue. True where it is another attempt's than the
    one this task or thread inherited, so that what it does next is in no scope. Where an attempt itself takes
    something (a client from a pool of clients), nothing changes."""
    inside = _scope.get()
    if inside is None or is_main():
        return False
    _work.set(origin)
    return origin is not inside


def foreign_work() -> Scope | None:
    """The other attempt whose work was taken here last, else None."""
    work = _work.get()
    return None if work is None or work is _scope.get() else work


def inherited_scope() -> Scope | None:
    """What was entered here or inherited, whether it still holds or not."""
    return _scope.get()


# -- entering one ------------------------------------------------------------------------------------------------------


def current_agent() -> str | None:
    """Who is speaking: the innermost `track_agent`, else the scope's own agent."""
    tracked = _agent.get()
    if tracked is not None:
        return tracked
    inside = current_scope()
    return None if inside is None else inside.agent


def agent_in(inside: Scope) -> str | None:
    """Who is speaking in the current scope, which the caller has already."""
    tracked = _agent.get()
    return inside.agent if tracked is None else tracked


@contextmanager
def scope(
    rollout_id: str,
    attempt_id: str,
    sink: SpanSink,
    agent: str | None = None,
    *,
    address: str = "",
    key: str = "",
    role: Literal["agent", "judge"] = "agent",
) -> Generator[Scope]:
    """What is emitted inside belongs to this attempt and goes to `sink`; what is started inside is in this scope until
    it is left. Calls to the server at `address` are known by the attempt's `key` (see `outbound.py`)."""
    trace_id = trace_id_of(attempt_id) or new_trace_id()
    address = address.rstrip("/")
    inside = Scope(rollout_id, attempt_id, sink, agent, trace_id=trace_id, address=address, key=key, role=role)
    with entered(inside):
        try:
            yield inside
        finally:
            inside.lifetime.end()


@contextmanager
def entered(inside: Scope) -> Generator[Scope]:
    """Code that runs here, and what it starts, is in the scope."""
    scope_token, work_token, main_token = _scope.set(inside), _work.set(None), _main.set(_here())
    try:
        yield inside
    finally:
        _main.reset(main_token)
        _work.reset(work_token)
        _scope.reset(scope_token)


@cache
def _install_outbound() -> None:
    from agentlightning.tracing import client_headers  # it reads the scope

    client_headers.install()


@contextmanager
def track_agent(name: str) -> Generator[None]:
    """Spans inside carry `gen_ai.agent.name`: who is speaking, and the unit of selective optimisation. So do the
    model calls made inside, by whatever client.

        >>> with agl.track_agent("writer"):
        ...     agl.emit_message("a draft")
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"track_agent({name!r}) names nobody; give the agent a name")
    _install_outbound()
    token = _agent.set(name)
    try:
        yield
    finally:
        _agent.reset(token)
