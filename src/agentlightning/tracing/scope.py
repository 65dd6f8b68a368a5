"""The current scope: the attempt, the agent and the span sink of the code that runs.

The runner enters `scope(...)` around an agent. Everything emitted within, in the same thread, in tasks it starts and in
`asyncio.to_thread`, belongs to that attempt, until the attempt ends. Bare threads inherit no context.

In a process that a runner has made for one attempt, what has no context belongs to that attempt. Where attempts
share one, none is guessed: `uncertainty` says which code may work for another attempt than its context names.

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
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from pkgutil import resolve_name
from types import CellType
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote

from agentlightning.attempt_address import ENDED, UNCERTAIN, attempt_trace_id
from agentlightning.span import EXCEPTION, REWARD, Span
from agentlightning.tracing.outbox import PostingSink


class SpanSink(Protocol):
    """Receives finished spans and passes them on to the store."""

    def put(self, spans: Sequence[Span]) -> None:
        """Take spans in order of emission. Called in the thread that ended them, often in an event loop: it must not
        block for long. It raises only where a program must not go on without them."""
        ...


Location = tuple[int, object]
"""A thread and the asyncio task that runs in it, or None."""
Place = tuple[str | None, Location]
"""An agent, and where it works."""


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt whose response was not emitted yet."""

    place: Place
    time: float
    attributes: dict[str, Any]
    emitted: bool = True
    """False for one that the result of a tool has made: the agent need not go on."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Scope:
    """One attempt, for the code that runs in it."""

    rollout_id: str
    attempt_id: str
    sink: SpanSink
    agent: str | None = None
    """The agent where no `track_agent` is active."""
    trace_id: str = field(init=False)
    """Trace id of spans without a parent: 32 hexadecimal digits."""
    _: KW_ONLY
    address: str = ""
    """URL of this attempt's server (`http://host:port`); requests to it carry the attempt's headers."""
    key: str = field(default="", repr=False)
    """The attempt's key."""
    role: Literal["agent", "judge"] = "agent"
    """`judge` for a reward function: its model calls are not part of the attempt."""
    is_known: Callable[[], bool] | None = None
    """Whether the server knows the attempt; asked before a model call names it. None: it does."""
    ended: bool = False
    only_marked: bool = False
    """Only what lies in a block of `track_critical_path` is recorded."""
    prompts: dict[Place, WaitingPrompt] = field(default_factory=dict["Place", "WaitingPrompt"], repr=False)
    """Prompts that wait for their responses (`emit.py`)."""
    at_end: Callable[[Scope], None] | None = None
    """Called before the end."""

    def __post_init__(self) -> None:
        self.trace_id = attempt_trace_id(self.attempt_id)

    def end(self) -> None:
        if self.at_end is not None:
            self.at_end(self)
        self.ended = True


ALWAYS_RECORDED: Final = frozenset({REWARD, EXCEPTION})
"""Names of spans that are recorded, marked or not."""

_scope: ContextVar[Scope | None] = ContextVar("agentlightning_scope", default=None)
tracked_agent: ContextVar[str | None] = ContextVar("agentlightning_agent", default=None)
"""Of the innermost `track_agent`."""
_owner: ContextVar[Location | None] = ContextVar("agentlightning_main", default=None)
"""The thread and task of the attempt itself. Elsewhere its scope is inherited."""
_marked = ContextVar("agentlightning_marked", default=False)


def current_scope() -> Scope | None:
    """The scope of the current code; None outside of any attempt."""
    inside = _scope.get()
    if inside is None:
        return process_scope()
    return None if inside.ended else inside


# -- implicit sessions -----------------------------------------------------------------------------------------------

BEGIN_IMPLICIT: Final = "agentlightning.recording.session:begin_implicit"
Speaker = asyncio.Task[Any] | threading.Thread

implicit_sessions: dict[Speaker, Scope] = {}
"""Those that are open. One for each speaker: a reward must not follow the call of a concurrent task or thread."""
_entered: list[Scope | None] = []
"""Scopes that are entered now, anywhere in the process; None for one that runs nothing but attempts."""


def current_speaker() -> Speaker:
    """The asyncio task that runs, else the thread."""
    return current_task() or threading.current_thread()


def recording_scope() -> Scope | None:
    """Where `emit_*` and `operation` record: the current scope, else the implicit session of this task or thread, which
    begins here. None where an attempt or a session is open elsewhere, and in what an earlier one has started."""
    if _process is not None and _scope.get() is None and uncertainty():
        return None
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
            inside.end()
            _scope.reset(token)
            yield inside


# -- the scope of a process ------------------------------------------------------------------------------------------

EVENT_URL: Final = "AGL_EVENT_URL"
KEY: Final = "AGL_KEY"
_EVENTS: Final = re.compile(r"^(https?://.+?)/(?:api/rollouts|rollout)/([^/]+)/attempt/([^/]+)/events/?$")


def process_scope() -> Scope | None:
    """The attempt that the whole process runs for: the one that a runner has given it to, else the one in its
    environment. Reads the environment of the process itself, not that of an attempt that shares it with others."""
    if _process is not None:
        return _process.attempt
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
    address = match[1]
    return Scope(unquote(match[2]), unquote(match[3]), PostingSink(address, key), address=address, key=key)


# -- inherited scopes --------------------------------------------------------------------------------------------------


def mark_owner() -> None:
    """Mark this task, or this thread outside of tasks, as the one that runs the attempt itself."""
    _owner.set(current_location())


def current_location() -> Location:
    return threading.get_ident(), current_task()


def current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


calls_of_pools = threading.local()
"""`future` is that of the call which a thread of a pool runs now."""


def _is_waited_for(owner: Location | None) -> bool:
    """Whether the current code is what an attempt itself runs, at `owner`, or what that waits for."""
    thread, task = current_location()
    if owner is None or owner in ((thread, task), (thread, None)):  # the second one: in a loop of its own
        return True
    found = [each for each in (task, getattr(calls_of_pools, "future", None)) if each is not None]
    return not found or any(is_awaited(each, owner[1], set()) for each in found)


def is_awaited(future: Any, by: object, seen: set[object]) -> bool:
    """Whether the task `by`, or a thread, waits for a future to end, through whatever asyncio and anyio put between
    them. `seen`: futures that it does not wait for."""
    if isinstance(future, Future) and (future._waiters or future._condition._waiters):  # type: ignore[attr-defined]
        return True
    seen.add(future)
    callbacks = (
        *(each for each, _ in getattr(future, "_callbacks", None) or ()),
        *getattr(future, "_done_callbacks", ()),
    )
    waiting = {each for callback in callbacks for each in _wakes(callback)} - seen
    return by in waiting or any(is_awaited(each, by, seen) for each in waiting)


def _wakes(callback: Any) -> Generator[object]:
    """The futures and tasks that a callback of a task wakes: those it holds, and those that wait in what it holds."""
    cells = [cell.cell_contents for cell in getattr(callback, "__closure__", None) or () if cell != CellType()]
    bound = getattr(callback, "__self__", None)
    for each in (bound, *(callback.args if isinstance(callback, partial) else ()), *cells):
        queue = getattr(bound, "_done", each)  # of `asyncio.as_completed`
        getters: Any = getattr(queue, "_getters", ()) if isinstance(queue, asyncio.Queue) else ()
        host = getattr(getattr(each, "cancel_scope", None), "_host_task", None)  # of anyio's TaskGroup
        waiting = (each, host, getattr(each, "_parent_task", None), *getters)
        yield from (found for found in waiting if isinstance(found, asyncio.Future | Future))


# -- processes of a runner ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunnerProcess:
    """This process, if a runner runs attempts in it."""

    alone: bool
    """It runs one attempt."""
    on_doubt: Callable[[str], None]
    """Told what nobody knows the attempt of."""
    address: str = ""
    """URL of the server of its attempts."""
    attempt: Scope | None = None
    """With `alone`: the one that runs."""


_process: RunnerProcess | None = None


def serve_attempts(*, alone: bool, on_doubt: Callable[[str], None]) -> None:
    """From now on, this process runs attempts of a runner and nothing else: what none of them emits is dropped."""
    global _process
    _process = RunnerProcess(alone, on_doubt)
    _entered.append(None)


def runner_process() -> RunnerProcess | None:
    return _process


def uncertainty(report: bool = True) -> str:
    """ENDED or UNCERTAIN if the current code may work for another attempt than the one whose context it has; else "".
    With `report`, the runner hears of it, and runs attempts apart.

    A task, or a function that a pool's thread runs, belongs to its attempt for certain where the attempt waits for it:
    what nothing waits for may take the work of others from a queue.
    """
    inside, process = _scope.get(), _process
    if inside is not None and inside.ended:
        found, what = ENDED, "a task or thread that has outlived its attempt"
    elif process is None:
        return ""
    elif inside is None:
        if process.alone:
            return ""
        found, what = UNCERTAIN, "a thread without a context"
    else:
        if process.alone or _is_waited_for(_owner.get()):
            return ""
        found, what = UNCERTAIN, "a task or thread that its attempt does not wait for"
    if report and process is not None and found == UNCERTAIN:
        process.on_doubt(f"{what} calls a model or emits something")
    return found


def is_left_out(inside: Scope, name: str) -> bool:
    """Whether a span of this name is not recorded, because it is not marked."""
    return inside.only_marked and not _marked.get() and name not in ALWAYS_RECORDED


@contextmanager
def mark_critical() -> Generator[None]:
    """Within the block, spans are marked."""
    token = _marked.set(True)
    try:
        yield
    finally:
        with suppress(ValueError):  # the block is left in another context than it was entered in
            _marked.reset(token)


inherited_scope = _scope.get
"""The scope that was entered or inherited, whether it is still valid or not; None without one."""


# -- entering one ------------------------------------------------------------------------------------------------------


def current_agent() -> str | None:
    """Name of the current agent: of the innermost `track_agent`, else of the scope."""
    return agent_in(current_scope())


def agent_in(inside: Scope | None) -> str | None:
    """`current_agent` for a caller that already has the current scope."""
    tracked = tracked_agent.get()
    return inside and inside.agent if tracked is None else tracked


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
    inside = Scope(rollout_id, attempt_id, sink, agent, address=address.rstrip("/"), key=key, role=role)
    with enter_scope(inside):
        try:
            yield inside
        finally:
            inside.end()


@contextmanager
def enter_scope(inside: Scope) -> Generator[Scope]:
    """Run the block, and the tasks it starts, in a scope."""
    scope_token, main_token = _scope.set(inside), _owner.set(current_location())
    _entered.append(inside)
    outer = _process and _process.attempt
    if _process is not None:
        _process.address = inside.address
        if _process.alone:
            _process.attempt = inside
    try:
        yield inside
    finally:
        if _process is not None:
            _process.attempt = outer
        _entered.remove(inside)
        _owner.reset(main_token)
        _scope.reset(scope_token)
