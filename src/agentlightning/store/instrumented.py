"""A store that says of every call how it went: for metrics and the log of slow operations, over any kind of store.

Observers see the method, what it was given, what came of it and how long it took; they change nothing. An observer is
called in the caller's event loop and has to be quick; what it raises is logged, never the caller's.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

WAITING_CALLS: Final = frozenset({"dequeue_rollout", "dequeue_many_rollouts", "wait_for_rollouts"})
"""They may take long because they were asked to."""


@dataclass(slots=True)
class Observed:
    """One call of a store that has ended. Not to be changed; freezing it would cost as much as all the rest."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    seconds: float
    result: Any = None
    error: BaseException | None = None

    @property
    def waits(self) -> bool:
        """Whether its time says nothing about the store, because it was waiting for others."""
        return self.method in WAITING_CALLS


class Waited:
    """How long one request has waited for others, in the calls that do: the longest of them, in seconds."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


waited: ContextVar[Waited | None] = ContextVar("agentlightning_waited", default=None)
"""Of the request that is being answered."""


class Observer(Protocol):
    """Who is told of calls."""

    def began(self, method: str) -> None:
        """A call has begun."""
        ...

    def ended(self, call: Observed) -> None:
        """It has ended, with a result, an error, or by being cancelled."""
        ...


class _Observing(LightningStoreBase):
    """What both halves of an observed store share; its methods are made below, one for each of the contract."""

    def __init__(self, store: LightningStoreBase, observers: Sequence[Observer]) -> None:
        self.store = store
        """The store that does the work."""
        self.path: Path | None = getattr(store, "path", None)
        """The file it is in, as of the store itself: journals lie beside it."""
        self._observers = tuple(observers)

    def __repr__(self) -> str:
        return repr(self.store)

    def iter_spans(self, rollout_ids: Sequence[str]) -> AsyncIterator[tuple[str, list[Span]]]:
        return self.store.iter_spans(rollout_ids)

    def tell_began(self, method: str) -> None:
        for observer in self._observers:
            observer.began(method)

    def tell_ended(self, call: Observed) -> None:
        if call.waits and (note := waited.get()) is not None:
            note.seconds = max(note.seconds, call.seconds)
        for observer in self._observers:
            try:
                observer.ended(call)
            except Exception:  # a mistake in counting must not cost anybody their call
                logger.exception("an observer failed on %s", call.method)


def _observed(name: str) -> Callable[..., Any]:
    async def method(self: _Observing, *arguments: Any, **options: Any) -> Any:
        self.tell_began(name)
        start = time.perf_counter()
        try:
            result = await getattr(self.store, name)(*arguments, **options)
        except BaseException as error:
            self.tell_ended(Observed(name, arguments, options, time.perf_counter() - start, error=error))
            raise
        self.tell_ended(Observed(name, arguments, options, time.perf_counter() - start, result))
        return result

    method.__name__ = name
    method.__doc__ = getattr(getattr(LightningStoreBase, name, None), "__doc__", None)
    return method


METHODS: Final = tuple(
    name
    for name, value in vars(LightningStoreBase).items()
    if inspect.iscoroutinefunction(value) and not name.startswith("_")
)
"""Every call of the contract that is awaited."""

_ObservedStore: Any = type("ObservedStore", (_Observing,), {name: _observed(name) for name in METHODS})
_PackingStore: Any = type("ObservedStore", (_ObservedStore,), {"add_packs": _observed("add_packs")})


def observed(store: LightningStoreBase, observers: Sequence[Observer]) -> LightningStoreBase:
    """The store given, with every call told to the observers. It takes packed spans where that does."""
    return (_PackingStore if hasattr(store, "add_packs") else _ObservedStore)(store, observers)


def ids_of(call: Observed) -> dict[str, str]:
    """The rollout, attempt and worker that a call is about, as far as its arguments say; the first of several."""
    found: dict[str, str] = {}
    names = _parameters(call.method)
    given = {**dict(zip(names, call.arguments, strict=False)), **call.options}
    for name in ("rollout_id", "attempt_id", "worker_id", "queue"):
        if isinstance(given.get(name), str):
            found[name] = given[name]
    spans: Any = given.get("spans") or ([given["span"]] if "span" in given else [])
    if spans and isinstance(spans[0], Span):
        found |= {"rollout_id": spans[0].rollout_id, "attempt_id": spans[0].attempt_id}
    ids: Any = given.get("rollout_ids") or given.get("rollout_id_in")
    if ids and isinstance(ids[0], str):
        found["rollout_id"] = ids[0]
    return found


def _parameters(method: str) -> list[str]:
    return list(inspect.signature(getattr(LightningStoreBase, method)).parameters)[1:]
