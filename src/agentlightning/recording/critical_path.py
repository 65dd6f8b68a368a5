"""`track_critical_path`: records only what is marked.

Within an attempt, its first block turns on recording of marked code alone: what lies in such a block is recorded, and
what comes outside of one from then on is not, but for rewards and the failure of the attempt. What is left out is
counted (`recording_status`). Outside of any attempt, a block is a session of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from agentlightning.recording.decorating import run_within
from agentlightning.recording.session import track_session
from agentlightning.tracing.scope import current_scope, mark_critical

P = ParamSpec("P")
R = TypeVar("R")


class CriticalPath:
    """A marked block. Created by `track_critical_path`.

    >>> with agl.track_critical_path():
    ...     agl.emit_message("recorded")
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> CriticalPath:
        if current_scope() is None:
            self._stack.enter_context(track_session())
        scope = current_scope()
        if scope is not None:
            scope.lifetime.only_marked = True
        self._stack.enter_context(mark_critical())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, where)

    async def __aenter__(self) -> CriticalPath:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, where)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: its calls are marked."""
        return run_within(function, lambda args, kwargs: CriticalPath(), "track_critical_path")


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
