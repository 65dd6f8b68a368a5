"""Brings sessions to a store, in the background, as `configure_recording` has set it.

The code that is recorded only appends to an `Outbox`, whose thread writes what has gathered there: what arrives within
a few hundredths of a second becomes one transaction. While the store cannot be written, because its disk is full or no
server answers, the queue keeps what it can hold, for as long as the process runs; beyond that it is dropped and
counted. Nothing is raised into the user's code.

Finished sessions are written whole, many in one transaction; open ones as they go on. Every call may be repeated
without taking effect twice. What the store rejects is written without the values it cannot hold, or dropped and
counted: it must not take other sessions with it.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from agentlightning.errors import ConfigError, ConflictError, Failure, NotFoundError, StoreClosedError
from agentlightning.rollouts import Attempt, Rollout, RolloutConfig, RolloutMode
from agentlightning.span import EXCEPTION_MESSAGE, EXCEPTION_STACKTRACE, Span
from agentlightning.store.base import LightningStore, pending_writers, store_url
from agentlightning.store.ids import claimed_id, new_id
from agentlightning.store.types import Retention, RolloutRecord
from agentlightning.tracing.agent_spans import sanitize_span, sanitize_value
from agentlightning.tracing.emit import exception_attributes
from agentlightning.tracing.messages import plain
from agentlightning.tracing.outbox import Outbox, RecordingStatus, counters
from agentlightning.tracing.scope import Speaker, end_implicit_scopes, implicit_sessions
from agentlightning.util.json_values import Json
from agentlightning.util.random_ids import random_bits

LINGER_SECONDS: Final = 0.02
"""How long the thread waits for more before it writes."""
MOST_WAITING: Final = 50_000
"""Records that wait at most; later spans, and sessions that begin later, are dropped."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""Characters of text in their attributes, at most."""
HEARTBEAT_SECONDS: Final = 60.0
SILENT_SECONDS: Final = 300.0
"""A session of a process that ended without a word fails after this time."""
PRUNE_SECONDS: Final = 600.0
"""How often old rollouts are removed, where there is a retention."""
EXIT_SECONDS: Final = 10.0
"""How long the end of the process is delayed for what is still to be written."""
PENDING_SECONDS: Final = 5.0
BEGIN_SECONDS: Final = 2.0
"""How long the first model call of a session waits for its start to be written, so that the gateway knows it."""
PATIENCE: Final = 2.0
"""Seconds for which one call waits for a server that does not answer."""
RECORDS_PER_CALL: Final = 1000

SESSION_QUEUE: Final = "_sessions"
"""The queue of sessions. It is private: no runner claims them."""
SESSION: Final = "session"
"""In the metadata of a rollout that is a session: its name, or ""."""
CONFIG: Final = RolloutConfig(unresponsive_seconds=SILENT_SECONDS)
REJECTED: Final = (ConfigError, ConflictError, NotFoundError)


# -- settings -------------------------------------------------------------------------------------------------------

StorePlace: TypeAlias = LightningStore | str | Path
Redact: TypeAlias = Callable[[Json], Mapping[str, Any]]
"""Attributes -> the attributes that may be stored."""

SAMPLING_RATE: Final = "sampling_rate"
"""In the metadata of a session: the probability with which it was kept, where that is below 1."""


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """What `configure_recording` sets."""

    store: StorePlace | None = None
    sampling_rate: float = 1.0
    redact: Redact | None = None
    retention: Retention | None = None


_settings = RecordingSettings()


def check_store(store: object) -> None:
    """Raises ConfigError for what names no store."""
    if store is not None and not isinstance(store, StorePlace):
        raise ConfigError(f"store={store!r:.80} is not a store; give LightningStore(...), a path or a URL")


def configure_recording(
    *,
    store: StorePlace | None = None,
    sampling_rate: float = 1.0,
    redact: Redact | None = None,
    retention: Retention | None = None,
) -> None:
    """Set how sessions that begin from now on are recorded; what is not given has its default again.

    store: where sessions go that name none; by default that of `LightningStore()`. sampling_rate: the share of sessions
    that is recorded, decided for each as a whole; the metadata of those that are kept holds the rate, so that a sample
    can be weighted by its inverse.

    redact: called in the background with the attributes of each span before anything is stored; returns those that may
    be. It is also given the attributes of events, the task and metadata of a session (`task`, `metadata`), the message
    of a failed span (`status_message`) and the failure of a session. What it raises for is dropped and counted.
    retention: finished rollouts beyond it are removed from the store, all of them and not only sessions.

    Raises ConfigError for values that cannot be.

        >>> def without_names(attributes):
        ...     return {key: value for key, value in attributes.items() if "name" not in key}
        >>> agl.configure_recording(sampling_rate=0.1, redact=without_names)
        >>> agl.configure_recording()
    """
    global _settings
    check_store(store)
    if isinstance(sampling_rate, bool) or not isinstance(sampling_rate, int | float) or not 0 <= sampling_rate <= 1:
        raise ConfigError(f"sampling_rate={sampling_rate!r:.80} is no probability; use a number from 0 to 1")
    if redact is not None and not callable(redact):
        raise ConfigError(f"redact={redact!r:.80} cannot be called; give a function of a dict of attributes")
    if retention is not None and not isinstance(retention, Retention):
        raise ConfigError(f"retention={retention!r:.80}: give agl.Retention(max_age_seconds=...)")
    _settings = RecordingSettings(store, float(sampling_rate), redact, retention)


# -- redaction ---------------------------------------------------------------------------------------------------------

# Everything of a session passes through the user's hook before it is written. What the hook raises for, or returns no
# mapping for, is not written: a span is dropped, a task becomes None, a failure loses its message. Each is counted, and
# the first is logged.

STATUS_MESSAGE: Final = "status_message"


def redact_spans(redact: Redact, spans: Sequence[Span]) -> list[Span]:
    """The spans as they may be stored."""
    kept = [allowed for span in spans if (allowed := _redact_span(redact, span)) is not None]
    counters.add("spans_dropped", len(spans) - len(kept))
    return kept


def redact_start(redact: Redact, rollout: Rollout) -> Rollout:
    """A session that begins, with the task and the metadata that may be stored."""
    own = {name: value for name, value in rollout.metadata.items() if name in (SESSION, SAMPLING_RATE)}
    given = {name: value for name, value in rollout.metadata.items() if name not in own}
    values = _redacted(redact, {"task": rollout.input, "metadata": given}, "the task of a session") or {}
    allowed = values.get("metadata")
    metadata = {**allowed, **own} if isinstance(allowed, Mapping) else own
    return replace(rollout, input=values.get("task"), metadata=metadata)


def redact_end(redact: Redact, end: Attempt) -> Attempt:
    """The end of a session that failed as it may be stored; the type of the failure stays."""
    failure = Failure(**end.metadata["error"])
    values = _redacted(redact, exception_attributes(failure), "the failure of a session") or {}
    message, traceback = values.get(EXCEPTION_MESSAGE, ""), values.get(EXCEPTION_STACKTRACE, "")
    return replace(end, metadata={"error": asdict(Failure(failure.type, str(message), str(traceback)))})


def _redact_span(redact: Redact, span: Span) -> Span | None:
    given = dict(span.attributes)
    if span.status_message is not None:
        given[STATUS_MESSAGE] = span.status_message
    attributes = _redacted(redact, given, f"a span {span.name!r}")
    of_events = [_redacted(redact, dict(each.attributes), f"an event of a span {span.name!r}") for each in span.events]
    if attributes is None or None in of_events:
        return None
    message = attributes.pop(STATUS_MESSAGE, None)
    pairs = zip(span.events, of_events, strict=True)
    events = tuple(replace(event, attributes=allowed) for event, allowed in pairs)
    return replace(span, attributes=attributes, events=events, status_message=None if message is None else str(message))


def _redacted(redact: Redact, attributes: Json, what: str) -> Json | None:
    try:
        allowed = redact(attributes)
        if not isinstance(allowed, Mapping):
            raise ConfigError(f"redact returned {type(allowed).__name__}; return a dict of attributes")
        return dict(allowed)
    except Exception as error:  # noqa: BLE001  the hook is the user's code
        counters.add("redactions_failed")
        counters.warn("redact", f"redact failed for {what}, which is not stored: {type(error).__name__}: {error}")
        return None


# -- sessions ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One session, and the sink of its spans. Once it has begun, what is not said below belongs to the thread that
    writes."""

    rollout: Rollout
    """As it began."""
    claim_id: str
    attempt_id: str
    process_id: int = field(default_factory=os.getpid)
    """Of the process that opened it."""
    redact: Redact | None = None
    recorder: Recorder | None = None
    """Who writes it; None if it is not recorded."""
    in_store: bool = False
    """Its rollout is in the store."""
    written: bool = False
    """All of it is in the store, with its end; but for spans that have ended after it."""
    lost: bool = False
    """The store has rejected it: nothing more of it is written."""
    spans: list[Span] = field(default_factory=list[Span])
    """Not yet written."""
    end: Attempt | None = None
    """Its attempt, once that has ended."""

    @property
    def ids(self) -> tuple[str, str]:
        return self.rollout.rollout_id, self.attempt_id

    # -- in the user's threads -----------------------------------------------------------------------------------------

    def put(self, spans: Sequence[Span]) -> None:
        if self.recorder is not None:
            self.recorder.offer([(self, spans)])

    def is_known(self) -> bool:
        """Whether the store has its start, which a gateway on the same server needs to record its calls; waits a moment
        for that."""
        recorder = self.recorder
        if recorder is not None and not (self.in_store or recorder.is_failing):
            recorder.flush(BEGIN_SECONDS)
        return self.in_store

    def finish(self, failure: Failure | None = None) -> None:
        """Queue its end, which is never dropped. A daemonic worker, as in `multiprocessing.Pool`, waits until it is
        written: SIGTERM may end it at any time."""
        if (recorder := self.recorder) is not None:
            now, start = time.time(), self.rollout.start_time
            status, said = ("succeeded", {}) if failure is None else ("failed", {"error": asdict(failure)})
            end = Attempt(*self.ids, 1, start, status, now, last_heartbeat_time=now, metadata=said)
            recorder.offer([(self, end)], always=True)
            if multiprocessing.current_process().daemon and not recorder.is_failing:
                recorder.flush(PENDING_SECONDS)

    # -- in the thread that writes -------------------------------------------------------------------------------------

    def add(self, what: Sequence[Span] | Attempt | None) -> None:
        """Prepare its start (None), spans of it, or its end for writing."""
        redact = self.redact
        if isinstance(what, Attempt):
            self.end = what if redact is None or not what.metadata else redact_end(redact, what)
        elif what is not None:
            self.spans += what if redact is None else redact_spans(redact, what)
        elif redact is not None:
            self.rollout = redact_start(redact, self.rollout)

    async def write(self, store: LightningStore) -> None:
        """Bring to the store what that does not have. May be called again after an error."""
        if self.lost:
            return self.drop_spans()
        end = self.end
        if end is not None and not self.in_store:
            await store.add_records([self.whole(end)])
            return self.note_written()
        if not self.in_store:
            await self._start(store)
        if self.spans:
            try:
                await store.add_many_spans(self.spans)
                counters.add("spans_written", len(self.spans))
            except REJECTED:
                for span in self.spans:
                    await _write_alone(store, span)
            self.spans = []
        if end is not None and not self.written:
            await store.update_attempt(*self.ids, status=end.status, metadata=end.metadata)
            self.note_written()

    def note_written(self) -> None:
        counters.add("spans_written", len(self.spans))
        counters.add("sessions_written")
        self.spans, self.in_store, self.written = [], True, True

    async def _start(self, store: LightningStore) -> None:
        rollout = self.rollout
        await store.start_rollout(
            rollout.input,
            rollout.mode,
            config=CONFIG,
            metadata=rollout.metadata,
            rollout_id=rollout.rollout_id,
            queue=SESSION_QUEUE,
            claim_id=self.claim_id,
        )
        await store.update_attempt(*self.ids, status="running")
        self.in_store = True

    def drop_spans(self) -> None:
        counters.add("spans_dropped", len(self.spans))
        self.spans = []

    def whole(self, end: Attempt) -> RolloutRecord:
        """All of it."""
        rollout = replace(self.rollout, status=end.status, end_time=end.end_time)
        spans = tuple(replace(span, sequence_id=number) for number, span in enumerate(self.spans, start=1))
        return RolloutRecord(rollout, (end,), spans)


def begin_session(
    task: Any, store: StorePlace | None, name: str | None, metadata: Mapping[str, Any] | None, mode: RolloutMode | None
) -> SessionRecord:
    """Begin a session as a rollout of its own. It has a recorder if it is recorded."""
    settings, claim_id = _settings, new_id("cl")
    own = {**plain(dict(metadata or {})), SESSION: name or ""}
    if settings.sampling_rate < 1:
        own[SAMPLING_RATE] = settings.sampling_rate
    rollout = Rollout(
        new_id("ro"), plain(task), time.time(), mode=mode, config=CONFIG, metadata=own, queue=SESSION_QUEUE
    )
    session = SessionRecord(rollout, claim_id, claimed_id(claim_id, 0), redact=settings.redact)
    if settings.sampling_rate < 1 and random_bits(53) / 2**53 >= settings.sampling_rate:
        counters.add("sessions_sampled_out")
        return session
    try:
        recorder = recorder_of(settings.store if store is None else store)
        counters.add("sessions")
        if recorder.offer([(session, None)]):  # else there is no room for it
            session.recorder = recorder
    except Exception as error:  # noqa: BLE001  recording must not end the program that is recorded
        counters.add("sessions_lost")
        counters.warn("begin", f"a session cannot be recorded: {error}")
    return session


Record = tuple[SessionRecord, "Sequence[Span] | Attempt | None"]
"""A session that has begun (None), spans of it, or its end."""


# -- the recorder ------------------------------------------------------------------------------------------------------


class Recorder(Outbox[Record]):
    """Writes sessions to the store at `place`, a path or URL, or to `given`."""

    def __init__(self, place: str | None, given: LightningStore | None) -> None:
        self._given = given
        """The user's, who closes it. Held, so that no other store gets its identity."""
        if given is not None:
            place = getattr(given, "path", None) or getattr(given, "url", None)
        self._place = None if place is None else str(place)
        self._token = (os.environ.get("AGL_TOKEN") or None) if given is None else getattr(given, "token", None)
        super().__init__(
            repr(given) if given is not None else str(place),
            patience=float("inf"),
            batch=RECORDS_PER_CALL,
            linger=LINGER_SECONDS,
            capacity=MOST_WAITING,
            max_size=MOST_BYTES,
            thread="agl-recorder",
        )
        self._store = given

    def reset(self) -> None:
        super().reset()
        self._store = None
        self._open_sessions: dict[str, SessionRecord] = {}
        self.is_failing = False
        """Whether the last attempt to write has failed."""
        self._next_prune = 0.0
        """On time.monotonic."""

    @property
    def server(self) -> tuple[str, str | None] | None:
        """(URL, access token) of the server whose store it is, if it is one's."""
        place = self._place
        return (place, self._token) if place and place.startswith(("http://", "https://")) else None

    def size_of(self, item: Record) -> int:
        """Characters of text in the attributes: what spans of agents mostly consist of."""
        size = 0
        for span in item[1] if isinstance(item[1], Sequence) else ():
            size += sum([len(value) for value in span.attributes.values() if type(value) is str])
        return size

    def drop(self, items: Sequence[Record], why: str) -> None:
        counters.add("sessions_lost", sum(what is None for _, what in items))
        counters.add("spans_dropped", _count_spans(items))
        if self.is_closed:
            counters.warn("end", f"the process ends: nothing more is recorded in {self.name}")
        else:
            counters.warn("full", f"recording falls behind: {why} for {self.name}, and more are dropped")

    def leave(self, items: Sequence[Record], timeout: float) -> None:
        left = [item for item in items if not item[0].written]
        lost, spans = len({session.ids for session, _ in left}), _count_spans(left)
        counters.add("sessions_lost", lost)
        counters.add("spans_dropped", spans)
        counters.warn(
            "exit", f"recording ends with {lost} sessions ({spans} spans) that could not be written to {self.name}"
        )

    # -- in the thread -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        beating = asyncio.create_task(self._keep_alive())
        try:
            await super().run()
        finally:
            beating.cancel()
            if self._store is not None and self._store is not self._given:
                with suppress(RuntimeError):  # at the end of the process, the store closes itself
                    await self._store.close()

    def take(self, batch: list[Record]) -> None:
        for session, what in batch:
            self._open_sessions[session.attempt_id] = session
            session.in_store = session.in_store or session.process_id != os.getpid()  # its parent writes its start
            session.add(what)

    async def send(self, batch: list[Record]) -> None:
        store = self._opened()
        changed = [
            each
            for each in self._open_sessions.values()
            if each.spans or (not each.written and (each.end or not each.in_store))
        ]
        ended = [(each, each.end) for each in changed if each.end is not None and not (each.in_store or each.lost)]
        with suppress(*REJECTED):  # then each is written by itself
            await store.add_records([each.whole(end) for each, end in ended])
            for each, _ in ended:
                each.note_written()
        left = (each for each in changed if each.spans or not each.written)
        for result in await asyncio.gather(*(_write(store, each) for each in left), return_exceptions=True):
            if result is not None:
                raise result
        self._open_sessions = {key: each for key, each in self._open_sessions.items() if each.end is None}
        if self.is_failing:
            counters.settle(f"store {self.name}")
            self.is_failing = False
        await self._prune()

    def is_temporary(self, error: Exception) -> bool:
        return True

    def failed(self, error: Exception) -> None:
        self.is_failing = True
        if isinstance(error, StoreClosedError):  # the user has closed the store that they had given
            self._store = None
        counters.warn(
            f"store {self.name}",
            f"sessions cannot be recorded in {self.name}: {error}. The program goes on; up to {MOST_WAITING} records"
            " wait until they can be written, and are counted by agentlightning.recording_status()",
        )

    async def _keep_alive(self) -> None:
        """Tell the store that sessions go on."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            going_on = [each for each in self._open_sessions.values() if each.in_store and not (each.end or each.lost)]
            try:
                for session in going_on:
                    await self._opened().update_attempt(*session.ids, last_heartbeat_time=time.time())
            except Exception as error:  # noqa: BLE001  whatever fails here must not reach the user's code
                counters.warn("beat", f"the store {self.name} is not told that sessions go on: {error}")
            await self._prune()

    async def _prune(self) -> None:
        retention = _settings.retention
        if retention is None or time.monotonic() < self._next_prune or self.is_closed:
            return
        self._next_prune = time.monotonic() + PRUNE_SECONDS
        try:
            await self._opened().prune(retention)
        except Exception as error:  # noqa: BLE001  whatever fails here must not reach the user's code
            counters.warn("prune", f"{self.name} cannot be pruned: {error}")

    def _opened(self) -> LightningStore:
        if self._store is None:
            if self._place is None:
                raise ConfigError(
                    f"{self.name} cannot be opened in another process; give track_session a path or a URL instead"
                )
            if self.server is None:
                self._store = LightningStore(self._place)
            else:
                from agentlightning.store.http.client import LightningStoreClient

                self._store = LightningStoreClient(*self.server, patience=PATIENCE)
        return self._store


async def _write(store: LightningStore, session: SessionRecord) -> None:
    """Write a session as it is, or else what the store can hold of it."""
    try:
        try:
            await session.write(store)
        except REJECTED:
            given = session.rollout
            task, metadata = sanitize_value(given.input), sanitize_value(given.metadata)
            session.rollout = replace(given, input=task, metadata=metadata)
            session.spans = list(map(sanitize_span, session.spans))
            await session.write(store)
    except REJECTED as error:
        session.lost = True
        counters.add("sessions_lost")
        counters.warn("rejected", f"the store rejects session {session.ids[0]}: {error}")
        session.drop_spans()


async def _write_alone(store: LightningStore, span: Span) -> None:
    try:
        await store.add_span(sanitize_span(span))
        counters.add("spans_written")
    except REJECTED as error:
        counters.add("spans_dropped")
        counters.warn("rejected", f"the store rejects span {span.name!r} of {span.rollout_id}: {error}")


def _count_spans(items: Sequence[Record]) -> int:
    return sum(len(what) for _, what in items if isinstance(what, Sequence))


# -- the recorders of this process -----------------------------------------------------------------------------------

_recorders: dict[object, Recorder] = {}
_lock = threading.Lock()
_installed = threading.Event()


def recorder_of(store: StorePlace | None = None) -> Recorder:
    """The recorder of a store: of the one given or named, else of `LightningStore()` in the current directory."""
    given = store if isinstance(store, LightningStore) else None
    place = _absolute(str(store_url(store))) if not isinstance(store, LightningStore) else None
    key = id(given) if place is None else place
    found = _recorders.get(key)
    if found is None:
        with _lock:
            _install()
            found = _recorders.get(key) or Recorder(place, given)
            _recorders[key] = found
    return found


def _absolute(place: str) -> str:
    """A store named so, wherever this process is."""
    return place if "://" in place or place == ":memory:" else str(Path(place).expanduser().absolute())


def flush_recording(timeout: float = 10.0) -> bool:
    """Wait until what was recorded so far is in the store: then it survives any end of the process. False if that took
    longer than `timeout` seconds. The end of the process waits for it by itself, and so does that of a worker of
    `multiprocessing`; `os._exit` in a process made by `os.fork` does not.

        >>> with agl.track_session():
        ...     agl.emit_message("here")
        >>> agl.flush_recording()
        True
    """
    end_implicit()
    return _flush(list(_recorders.values()), timeout)


def _flush(recorders: Sequence[Recorder], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    done = [each.flush(max(0.0, deadline - time.monotonic())) for each in recorders]
    return all(done)


def recording_status() -> RecordingStatus:
    """What this process has recorded, and what could not be.

    >>> agl.recording_status().spans_dropped
    0
    """
    return counters.status(sum(each.waiting for each in list(_recorders.values())))


def end_implicit(*speakers: Speaker) -> None:
    """End the implicit sessions of these tasks and threads, of all without any, so that readers find them finished."""
    for inside in end_implicit_scopes(speakers):
        if isinstance(inside.sink, SessionRecord):
            inside.sink.finish()


def _install() -> None:
    """Flush before a store is opened, and at the end of this process and of its children."""
    if _installed.is_set():
        return
    _installed.set()
    atexit.register(_close_all)
    pending_writers.append(_flush_pending)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    multiprocessing.util.register_after_fork(_installed, _in_worker)
    if multiprocessing.parent_process() is not None:
        _in_worker(None)


def _flush_pending() -> None:
    recorders = list(_recorders.values())
    if any(each.is_current_thread for each in recorders):
        return
    end_implicit()
    _flush([each for each in recorders if not each.is_failing], PENDING_SECONDS)  # else waiting would not help


def _close_all() -> None:
    end_implicit()
    for each in list(_recorders.values()):
        each.close(EXIT_SECONDS)


def _before_fork() -> None:
    """A child process continues the sessions of its parent: their rollouts must be in the store by then."""
    _flush(list(_recorders.values()), PENDING_SECONDS)


def _after_fork() -> None:
    counters.lock = threading.RLock()  # a thread of the parent may hold it
    implicit_sessions.clear()  # They are the parent's.


def _in_worker(_: object) -> None:
    """A worker of `multiprocessing` ends without `atexit`, whether its parent has recorded before or not."""
    multiprocessing.util.Finalize(_installed, _close_all, exitpriority=0)
