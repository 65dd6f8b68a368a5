"""A proxy store that reports every call to observers: for metrics, logs and exporters, over any kind of store.

An observer gets the method, its arguments, its outcome and its duration; it changes nothing. It is called in the
caller's event loop and must be fast; what it raises is logged, and never reaches the caller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agentlightning.span import Span
from agentlightning.store.base import METHODS, LightningStoreBase, implement, parameters_of
from agentlightning.store.types import RolloutRecord

logger = logging.getLogger(__name__)

WAITING_CALLS: Final = frozenset({"dequeue_rollout", "dequeue_many_rollouts", "wait_for_rollouts"})
"""Calls that wait for others, so that their duration says nothing about the store."""


@dataclass(slots=True)
class CallRecord:
    """A finished call of a store. To be treated as immutable; freezing it would double the cost of recording."""

    method: str
    arguments: dict[str, Any]
    """By name: those that were given."""
    seconds: float
    result: Any = None
    error: BaseException | None = None
    spans: Sequence[Span] = ()
    """What the call has stored; not those of packs, which are encoded already."""

    @property
    def waits(self) -> bool:
        return self.method in WAITING_CALLS


class WaitTime:
    """The longest time in seconds that one request has spent in a call that waits for others."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


wait_time: ContextVar[WaitTime | None] = ContextVar("agentlightning_wait_time", default=None)
"""Of the request that is being handled."""


class Observer(Protocol):
    def on_start(self, method: str) -> None:
        """A call has started; by default nothing is done."""
        return

    def on_end(self, call: CallRecord) -> None:
        """A call has ended, with a result, an error, or by being cancelled."""
        ...


class _InstrumentedStore(LightningStoreBase):
    """The awaited methods are generated below, one for each of the contract."""

    def __init__(self, store: LightningStoreBase, observers: Sequence[Observer]) -> None:
        self.store = store
        """The store that does the work."""
        self.observers = tuple(observers)

    def __repr__(self) -> str:
        return repr(self.store)

    def iter_spans(self, rollout_ids: Sequence[str], tokens: bool = True) -> AsyncIterator[tuple[str, list[Span]]]:
        return self.store.iter_spans(rollout_ids, tokens)

    def notify_end(self, call: CallRecord) -> None:
        if call.waits and (waited := wait_time.get()) is not None:
            waited.seconds = max(waited.seconds, call.seconds)
        for observer in self.observers:
            try:
                observer.on_end(call)
            except Exception:  # a bug in an observer must not fail the call
                logger.exception("an observer failed on %s", call.method)


def _forward(name: str) -> Callable[..., Any]:
    parameters = parameters_of(name)

    async def method(self: _InstrumentedStore, *arguments: Any, **options: Any) -> Any:
        for observer in self.observers:
            observer.on_start(name)
        call = CallRecord(name, dict(zip(parameters, arguments, strict=False)) | options, 0.0)
        start = time.perf_counter()
        try:
            new = await _new(self.store, *arguments, **options) if name == "add_records" else []
            call.result = result = await getattr(self.store, name)(*arguments, **options)
            added = {"add_span": [result], "add_many_spans": result, "add_records": new if result else ()}
            call.spans = added.get(name, ())
        except BaseException as error:
            call.error = error
            raise
        finally:
            call.seconds = time.perf_counter() - start
            self.notify_end(call)
        return result

    return method


async def _new(store: LightningStoreBase, records: Sequence[RolloutRecord]) -> list[Span]:
    """The spans that these records add: a rollout that is known already is skipped."""
    ids = [record.rollout.rollout_id for record in records]
    known = {rollout.rollout_id for rollout in await store.query_rollouts(rollout_id_in=ids)}
    return [span for record in records if record.rollout.rollout_id not in known for span in record.spans]


implement(_InstrumentedStore, {name: _forward(name) for name in METHODS})


def instrument(store: LightningStoreBase, observers: Sequence[Observer]) -> LightningStoreBase:
    """Wrap a store so that every call is reported to the observers."""
    return _InstrumentedStore(store, observers)


def ids_of(call: CallRecord) -> dict[str, str]:
    """The rollout, attempt, worker and queue among the arguments of a call; the first of several."""
    arguments, names = call.arguments, ("rollout_id", "attempt_id", "worker_id", "queue")
    found: dict[str, str] = {name: arguments[name] for name in names if isinstance(arguments.get(name), str)}
    spans: Any = arguments.get("spans") or ([arguments["span"]] if "span" in arguments else [])
    if spans and isinstance(spans[0], Span):
        found |= {"rollout_id": spans[0].rollout_id, "attempt_id": spans[0].attempt_id}
    ids: Any = arguments.get("rollout_ids") or arguments.get("rollout_id_in")
    if ids and isinstance(ids[0], str):
        found["rollout_id"] = ids[0]
    return found
