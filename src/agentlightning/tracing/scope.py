"""The current scope: the attempt, the agent and the span sink of the code that runs.

The runner enters `scope(...)` around an agent. Everything emitted within, in the same thread, in tasks it starts and in
`asyncio.to_thread`, belongs to that attempt. Bare threads inherit no context, and no attempt is guessed for them: a
reward recorded for the wrong attempt is worse than one dropped with a warning.

Inheritance ends when the attempt ends. A task or thread that takes an item which another attempt has put into a queue
has no scope until it takes an item of its own attempt again (`runner/hosts/context_propagation.py` tracks queues). An
answer is no such item: one that comes through a queue that the task made itself, from a task that serves its attempt.

A program whose environment names an attempt (`AGL_EVENT_URL`, `AGL_KEY`) is in that attempt's scope wherever no other
scope is entered.

What is emitted outside of all of these belongs to the implicit session of its thread or asyncio task
(`recording_scope`), unless an attempt or a session is open in the process: it may be theirs.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote
from weakref import WeakSet

from agentlightning.attempt_address import trace_id_of
from agentlightning.span import EXCEPTION, REWARD, Span, new_trace_id
from agentlightning.tracing.posting_sink import PostingSink


class SpanSink(Protocol):
    """Receives finished spans and passes them on to the store."""

    def put(self, spans: Sequence[Span]) -> None:
        """Take spans in order of emission. Called in the thread that ended them, often in an event loop: it must not
        block for long. It raises only where a program must not go on without them."""
        ...


Location = tuple[int, object]
"""A thread and the asyncio task that runs in it, or None."""


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt whose response was not emitted yet."""

    agent: str | None
    location: Location
    time: float
    attributes: dict[str, Any]
    emitted: bool = True
    """False for one that the result of a tool has made: the agent need not go on."""


@dataclass(slots=True)
class Lifetime:
    """The mutable state of a scope."""

    certain: bool = True
    """Neither `ended` nor `ambiguous`; checked first because it nearly always holds."""
    ended: bool = False
    ambiguous: bool = False
    """A task or thread that it started passed on another attempt's work in an untracked way, so that an inherited scope
    is no longer reliable."""

    served: WeakSet[Scope] = field(default_factory=WeakSet["Scope"])
    """The other attempts whose items its tasks and threads have taken from queues, as a shared connection's do."""
    only_marked: bool = False
    """Only what lies in a block of `track_critical_path` is recorded."""
    prompts: list[WaitingPrompt] = field(default_factory=list["WaitingPrompt"])
    """Prompts that wait for their responses (`emit.py`)."""
    is_known: Callable[[], bool] | None = None
    """Whether the server knows the attempt; asked before a model call names it. None: it does."""
    at_end: Callable[[], None] | None = None
    """Called once, before the end."""

    def end(self) -> None:
        at_end, self.at_end = self.at_end, None
        if at_end is not None:
            at_end()
        self.ended, self.certain = True, False

    def mark_ambiguous(self) -> None:
        self.ambiguous, self.certain = True, False


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Scope:
    """One attempt, for the code that runs in it."""

    rollout_id: str
    attempt_id: str
    sink: SpanSink
    agent: str | None = None
    """The agent where no `track_agent` is active."""
    trace_id: str = field(default_factory=new_trace_id, kw_only=True)
    """Trace id of spans without a parent: 32 hexadecimal digits."""
    address: str = field(default="", kw_only=True)
    """URL of this attempt's server (`http://host:port`); requests to it carry the attempt's headers."""
    key: str = field(default="", kw_only=True, repr=False)
    """The attempt's key."""
    role: Literal["agent", "judge"] = field(default="agent", kw_only=True)
    """`judge` for a reward function: its model calls are not part of the attempt."""
    lifetime: Lifetime = field(default_factory=Lifetime, kw_only=True, repr=False)


ALWAYS_RECORDED: Final = frozenset({REWARD, EXCEPTION})
"""Names of spans that are recorded, marked or not."""

_scope: ContextVar[Scope | None] = ContextVar("agentlightning_scope", default=None)
_agent: ContextVar[str | None] = ContextVar("agentlightning_agent", default=None)
_owner: ContextVar[Location | None] = ContextVar("agentlightning_main", default=None)
"""The thread and task of the attempt itself. Elsewhere its scope is inherited."""
_marked: ContextVar[bool] = ContextVar("agentlightning_marked", default=False)
_run: ContextVar[Scope | None] = ContextVar("agentlightning_work", default=None)
"""The attempt that had put the last item taken from a queue, where the scope is inherited."""


def current_scope() -> Scope | None:
    """The scope of the current code; None outside of any attempt."""
    inside = _scope.get()
    if inside is None:
        return process_scope()
    if inside.lifetime.certain and _run.get() is None:  # the common case
        return inside
    return inside if _is_valid(inside) else None


def _is_valid(inside: Scope) -> bool:
    if inside.lifetime.ended:
        return False
    if (work := _run.get()) is not None:
        return work is inside
    return not inside.lifetime.ambiguous or is_owner()


# -- implicit sessions -----------------------------------------------------------------------------------------------

BEGIN_IMPLICIT: Final = "agentlightning.recording.session:begin_implicit"
Speaker = asyncio.Task[Any] | threading.Thread

implicit_sessions: dict[Speaker, Scope] = {}
"""Those that are open. One for each speaker: a reward must not follow the call of a concurrent task or thread."""
_entered: list[Scope | None] = []
"""Scopes that are entered now, anywhere in the process; None for one that runs nothing but attempts."""


def forbid_implicit() -> None:
    """This process runs attempts alone: what none of them emits is dropped."""
    _entered.append(None)


def current_speaker() -> Speaker:
    """The asyncio task that runs, else the thread."""
    return current_task() or threading.current_thread()


def recording_scope() -> Scope | None:
    """Where `emit_*` and `operation` record: the current scope, else the implicit session of this task or thread, which
    begins here. None where an attempt or a session is open elsewhere, and in what an earlier one has started."""
    inside = current_scope()
    if inside is not None or _entered or _scope.get() is not None:
        return inside
    return implicit_sessions.get(current_speaker()) or resolve_name(BEGIN_IMPLICIT)()


def end_implicit_scopes(speakers: Sequence[Speaker] = ()) -> Generator[Scope]:
    """The implicit sessions of these speakers, of all without any, each of which has ended."""
    for speaker in speakers or tuple(implicit_sessions):
        inside = implicit_sessions.pop(speaker, None)
        if inside is not None:
            token = _scope.set(inside)  # What still waits for an answer belongs to it.
            inside.lifetime.end()
            _scope.reset(token)
            yield inside


# -- the scope of a process ------------------------------------------------------------------------------------------

EVENT_URL: Final = "AGL_EVENT_URL"
KEY: Final = "AGL_KEY"
_EVENTS: Final = re.compile(r"^(https?://.+?)/(?:api/rollouts|rollout)/([^/]+)/attempt/([^/]+)/events/?$")


def process_scope() -> Scope | None:
    """The attempt that the whole process runs for, according to its environment; None if it names none.

    Reads the environment of the process itself, not that of an attempt that shares the process with others.
    """
    url, key = _process_variable(EVENT_URL), _process_variable(KEY)
    return _scope_of(url, key) if url and key else None


def _process_variable(name: str) -> str:
    # Not `os.environ`, which agent hosts replace by the environment of the current attempt.
    values: dict[bytes, bytes] | None = getattr(os, "environb", None)
    return os.environ.get(name, "") if values is None else os.fsdecode(values.get(os.fsencode(name), b""))


@cache
def _scope_of(url: str, key: str) -> Scope | None:
    match = _EVENTS.match(url)
    if match is None:
        return None
    address, rollout_id, attempt_id = match[1], unquote(match[2]), unquote(match[3])
    trace_id = trace_id_of(attempt_id) or new_trace_id()
    return Scope(rollout_id, attempt_id, PostingSink(address, key), trace_id=trace_id, address=address, key=key)


# -- inherited scopes --------------------------------------------------------------------------------------------------


def mark_owner() -> None:
    """Mark this task, or this thread outside of tasks, as the one that runs the attempt itself."""
    _owner.set(current_location())


def is_owner() -> bool:
    return _owner.get() == current_location()


def current_location() -> Location:
    return threading.get_ident(), current_task()


def current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True)
class Origin:
    """Who has put an item into a queue."""

    attempt: Scope
    """On whose behalf."""
    started_by: Scope | None
    """The attempt that has started the task or thread; None for the attempt's own."""


def origin_of_work() -> Origin | None:
    """On whose behalf the current code puts items into queues; None if unknown."""
    inside = _scope.get()
    started_by = None if is_owner() else inside
    if (work := _run.get()) is not None:
        return Origin(work, started_by)
    return Origin(inside, started_by) if inside is not None and _is_valid(inside) else None


def take_work(origin: Origin, own_queue: bool = False) -> bool:
    """Note that an item was taken from a queue, which the current task or thread has made itself if `own_queue`. True
    if it was put for another attempt than the inherited one: what this task or thread does next has no scope.

    Two kinds of items change nothing: those taken by an attempt's own task, such as a client from a pool of clients,
    and answers to requests, such as those of a tool server's connection that another attempt has opened.
    """
    inside = _scope.get()
    if inside is None or is_owner():
        return False
    if own_queue and origin.started_by is not None and (_run.get() or inside) in origin.started_by.lifetime.served:
        return False
    if origin.attempt is not inside:
        inside.lifetime.served.add(origin.attempt)
    _run.set(origin.attempt)
    return origin.attempt is not inside


def current_work() -> Scope | None:
    """The attempt that had put the last item taken from a queue in this context, if any."""
    return _run.get()


def continue_work(work: Scope | None) -> None:
    """Note that what this task or thread does next is for the attempt that a task it waited for works for."""
    if work is not None and _scope.get() is not None and not is_owner():
        _run.set(work)


def foreign_work() -> Scope | None:
    """The other attempt whose item was taken last in this context, if any."""
    work = _run.get()
    return None if work is None or work is _scope.get() else work


def is_left_out(inside: Scope, name: str) -> bool:
    """Whether a span of this name is not recorded, because it is not marked."""
    return inside.lifetime.only_marked and not _marked.get() and name not in ALWAYS_RECORDED


@contextmanager
def mark_critical() -> Generator[None]:
    """Within the block, spans are marked."""
    token = _marked.set(True)
    try:
        yield
    finally:
        with suppress(ValueError):  # the block is left in another context than it was entered in
            _marked.reset(token)


def inherited_scope() -> Scope | None:
    """The scope that was entered or inherited, whether it is still valid or not."""
    return _scope.get()


# -- entering one ------------------------------------------------------------------------------------------------------


def current_agent() -> str | None:
    """Name of the current agent: of the innermost `track_agent`, else of the scope."""
    tracked = _agent.get()
    if tracked is not None:
        return tracked
    inside = current_scope()
    return inside and inside.agent


def agent_in(inside: Scope) -> str | None:
    """`current_agent` for a caller that already has the current scope."""
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
    """Spans emitted within the block belong to this attempt and go to `sink`; so do those of tasks started within it,
    until the block is left. Requests to the server at `address` carry the attempt's `key` (`client_headers.py`)."""
    trace_id = trace_id_of(attempt_id) or new_trace_id()
    address = address.rstrip("/")
    inside = Scope(rollout_id, attempt_id, sink, agent, trace_id=trace_id, address=address, key=key, role=role)
    with enter_scope(inside):
        try:
            yield inside
        finally:
            inside.lifetime.end()


@contextmanager
def enter_scope(inside: Scope) -> Generator[Scope]:
    """Run the block, and the tasks it starts, in a scope."""
    scope_token, work_token, main_token = _scope.set(inside), _run.set(None), _owner.set(current_location())
    _entered.append(inside)
    try:
        yield inside
    finally:
        _entered.remove(inside)
        _owner.reset(main_token)
        _run.reset(work_token)
        _scope.reset(scope_token)


@contextmanager
def agent_scope(name: str) -> Generator[None]:
    """Within the block, `name` is the current agent."""
    token = _agent.set(name)
    try:
        yield
    finally:
        _agent.reset(token)
