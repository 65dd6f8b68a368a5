"""`track_session`: a rollout that the user's own code makes, recorded while it runs.

A session is an attempt like those of a runner: what `emit_*`, `operation` and OpenTelemetry record within it, in tasks
it starts and in `asyncio.to_thread`, belongs to it. It succeeds when its block ends, and fails with the exception that
leaves it. Within an attempt of a runner, or in another session, it makes no rollout of its own: it is part of that one,
so that the same code can be recorded in production and trained.

What is emitted outside of all of these makes an implicit session (`begin_implicit`). `track_critical_path` records only
what is marked.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, Final, ParamSpec, Self, TypeVar, cast, get_args, overload

from agentlightning.attempt_address import attempt_key, attempt_secret
from agentlightning.errors import ConfigError, Failure
from agentlightning.recording.recorder import SessionRecord, StorePlace, begin_session, check_store, end_implicit
from agentlightning.rollouts import RolloutMode
from agentlightning.span import EXCEPTION
from agentlightning.tracing import client_headers
from agentlightning.tracing.emit import Block, bound_arguments, emit_annotation, exception_attributes
from agentlightning.tracing.messages import PLAIN, json_text
from agentlightning.tracing.outbox import counters
from agentlightning.tracing.scope import (
    Scope,
    current_scope,
    current_speaker,
    enter_scope,
    implicit_sessions,
    mark_critical,
)
from agentlightning.tracing.tracer import record

P = ParamSpec("P")
R = TypeVar("R")

IMPLICIT: Final = "implicit"
"""Name of a session that nobody has opened."""


@dataclass(eq=False, repr=False)
class Session(Block):
    """One session; it also decorates functions. Created by `track_session`.

    >>> with agl.track_session() as session:
    ...     session.attempt_id[:3]
    'at-'
    """

    _task: Any = None
    _store: StorePlace | None = None
    _name: str | None = None
    _metadata: Mapping[str, Any] | None = None
    _mode: RolloutMode | None = None
    _only_marked: bool = False
    _scope: Scope | None = None
    """That of the rollout that it is, or is part of."""
    _entered: AbstractContextManager[Scope] | None = None
    """Its own scope, while it is in it."""

    def __post_init__(self) -> None:
        check_store(self._store)
        if self._metadata is not None and not isinstance(self._metadata, Mapping):
            raise ConfigError(f"metadata={self._metadata!r:.80} is not a dict")
        if self._name is not None and not isinstance(self._name, str):
            raise ConfigError(f"name={self._name!r:.80} is not a string")
        if self._mode is not None and self._mode not in get_args(RolloutMode):
            raise ConfigError(f"mode={self._mode!r:.80} is not train, val or test")

    @property
    def rollout_id(self) -> str:
        """The id of its rollout."""
        return self._begun().rollout_id

    @property
    def attempt_id(self) -> str:
        """The id of its attempt."""
        return self._begun().attempt_id

    def _begun(self) -> Scope:
        if self._scope is None:
            raise ConfigError("the session has not begun; use `with agl.track_session() as session`")
        return self._scope

    # -- as a block --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._scope is not None:
            raise ConfigError("a session is used once; call agl.track_session() for each block")
        self._scope = current_scope()
        if self._scope is None:
            self._entered = enter_scope(self._begin())
            self._entered.__enter__()
        else:
            self._scope.only_marked |= self._only_marked
            self._annotate()
        return self

    def _begin(self) -> Scope:
        """Begin it as a rollout of its own, without entering its scope."""
        session = begin_session(self._task, self._store, self._name, self._metadata, self._mode)
        scope = self._scope = Scope(*session.ids, session)
        scope.only_marked = self._only_marked
        if session.recorder is not None and session.recorder.server is not None:
            client_headers.install()
            address, token = session.recorder.server
            scope.address, scope.is_known = address.rstrip("/"), session.is_known
            scope.key = attempt_key(attempt_secret(token), *session.ids)
        return scope

    def _annotate(self) -> None:
        """Keep what is said of a session that is part of another rollout."""
        said = {"name": self._name, "task": self._task, "metadata": self._metadata, "mode": self._mode}
        given = {f"agentlightning.session.{key}": value for key, value in said.items() if value is not None}
        if given:
            emit_annotation(
                {key: value if isinstance(value, PLAIN) else json_text(value) for key, value in given.items()}
            )

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if self._entered is None:
            return  # it is part of another rollout
        success = isinstance(error, SystemExit) and error.code in (None, 0)
        failure = None if error is None or success else Failure.of(error)
        if failure is not None and current_scope() is not None:
            record(EXCEPTION, exception_attributes(failure), error=f"{failure.type}: {failure.message}")
        entered, self._entered = self._entered, None
        scope = self._begun()
        scope.end()
        with suppress(ValueError):  # the block is left in another context than it was entered in
            entered.__exit__(None, None, None)
        cast(SessionRecord, scope.sink).finish(failure)

    # -- as a decorator ----------------------------------------------------------------------------------------------

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call is a session, whose task are the arguments unless one was given."""
        _refuse_generators(function, "track_session")
        signature = inspect.signature(function)

        def session(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Session:
            task = bound_arguments(signature, args, kwargs) if self._task is None else self._task
            return replace(self, _task=task, _name=self._name or function.__qualname__)

        return self._run_within(function, session)


@overload
def track_session(function: Callable[P, R], /) -> Callable[P, R]: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def track_session(
    task: Any = None,
    *,
    store: StorePlace | None = None,
    name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    mode: RolloutMode | None = None,
    only_marked: bool = False,
) -> Session: ...
def track_session(
    task: Any = None,
    *,
    store: StorePlace | None = None,
    name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    mode: RolloutMode | None = None,
    only_marked: bool = False,
) -> Any:
    """Record what your own code does as a rollout: a block, sync or async, or a decorated function.

    task: what the session is about, any JSON value; of a decorated function, its arguments. store: a store, a path or
    a URL; by default that of `LightningStore()`. name, metadata: kept with the rollout. mode: train, val or test.
    only_marked: record only what lies in blocks of `track_critical_path`, and rewards.

        >>> with agl.track_session({"question": "6 x 7"}) as session:
        ...     agl.emit_reward(1.0)
        >>> session.rollout_id[:3]
        'ro-'

    Records are written in the background. No trouble with the store is raised: it is logged once and counted
    (`recording_status`). Raises ConfigError for arguments of the wrong type.
    """
    if callable(task) and inspect.isroutine(task):
        return Session(None, store, name, metadata, mode, only_marked)(task)
    return Session(task, store, name, metadata, mode, only_marked)


def begin_implicit() -> Scope:
    """Begin the session of what this asyncio task, or this thread, emits outside of any other. It ends, as a success,
    with its task, when this process opens a store, learns from one or calls `flush_recording`, and with the process."""
    counters.add("sessions_implicit")
    counters.note(
        "implicit",
        "agl.emit_* was called outside of a session: what this process emits is recorded as one rollout (one for each"
        " thread and asyncio task), until a store is opened or the process ends. Open `with agl.track_session():`"
        " around each piece of work to make rollouts of your own",
    )
    speaker = current_speaker()
    inside = implicit_sessions[speaker] = Session(_name=IMPLICIT)._begin()  # pyright: ignore[reportPrivateUsage]
    if isinstance(speaker, asyncio.Task):
        speaker.add_done_callback(end_implicit)
    return inside


def carry_session(function: Callable[P, R]) -> Callable[P, R]:
    """The function, to be run by a thread that inherits nothing: its calls belong to the session of this code.

    >>> import threading
    >>> with agl.track_session():
    ...     thread = threading.Thread(target=agl.carry_session(agl.emit_message), args=["from a thread"])
    ...     thread.start()
    ...     thread.join()
    """
    context = copy_context()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        return context.run(copy_context).run(function, *args, **kwargs)

    return carried


def _refuse_generators(function: Callable[..., Any], door: str) -> None:
    """Raises ConfigError for a generator, whose code runs between other code."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{door} cannot decorate the generator {function.__qualname__}: its code runs between other code; open"
            f" `with agl.{door}()` around the loop that consumes it"
        )


# -- only what is marked -----------------------------------------------------------------------------------------------

# Within an attempt, its first block turns on recording of marked code alone: what lies in such a block is recorded, and
# what comes outside of one from then on is not, but for rewards and the failure of the attempt. What is left out is
# counted (`recording_status`). Outside of any attempt, a block is a session of its own.


class CriticalPath(Block):
    """A marked block. Created by `track_critical_path`.

    >>> with agl.track_critical_path():
    ...     agl.emit_message("recorded")
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(track_session(only_marked=True))  # of its own, or part of the one around it
        self._stack.enter_context(mark_critical())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        self._stack.__exit__(kind, error, where)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: its calls are marked."""
        _refuse_generators(function, "track_critical_path")
        return self._run_within(function, lambda args, kwargs: CriticalPath())


@overload
def track_critical_path(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def track_critical_path() -> CriticalPath: ...
def track_critical_path(function: Any = None, /) -> Any:
    """Mark a block, sync or async, or a function: from the first mark on, an attempt records only what is marked.

        >>> with agl.track_session():
        ...     with agl.track_critical_path():
        ...         agl.emit_message("recorded")
        ...     agl.emit_message("counted, and not recorded")
        ...     agl.emit_reward(1.0)

    Rewards and failures are always recorded. `track_session(only_marked=True)` leaves out what comes before the first
    mark, too. Calls that a gateway answers are recorded by the gateway, marked or not.
    """
    return CriticalPath() if function is None else CriticalPath()(function)
