"""Brings sessions to a store, in the background.

The code that is recorded only appends to an `Outbox`, whose thread writes what has gathered there: what arrives within
a few hundredths of a second becomes one transaction. While the store cannot be written, because its disk is full or no
server answers, the queue keeps what it can hold, for as long as the process runs; beyond that it is dropped and
counted. Nothing is raised into the user's code.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError, StoreClosedError
from agentlightning.recording.records import SessionEnd, SessionRecord, StoreWriter
from agentlightning.recording.settings import current_settings
from agentlightning.span import Span
from agentlightning.store import pending
from agentlightning.store.base import DEFAULT_STORE, LightningStore
from agentlightning.tracing.outbox import Outbox, RecordingStatus, counters
from agentlightning.tracing.scope import Speaker, end_implicit_scopes, implicit_sessions

LINGER_SECONDS: Final = 0.02
"""How long the thread waits for more before it writes."""
MOST_WAITING: Final = 50_000
"""Records that wait at most; later spans, and sessions that begin later, are dropped."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""Characters of text in their attributes, at most."""
HEARTBEAT_SECONDS: Final = 60.0
PRUNE_SECONDS: Final = 600.0
"""How often old rollouts are removed, where there is a retention."""
EXIT_SECONDS: Final = 10.0
"""How long the end of the process is delayed for what is still to be written."""
PENDING_SECONDS: Final = 5.0
BEGIN_SECONDS: Final = 2.0
"""How long the first model call of a session waits for its start to be written, so that the gateway knows it."""
PATIENCE: Final = 2.0
"""Seconds for which one call waits for a server that does not answer."""

Record = tuple[SessionRecord, "Sequence[Span] | SessionEnd | None"]
"""A session that has begun (None), spans of it, or its end."""
Server = tuple[str, "str | None"]
"""URL and access token."""


class Recorder(Outbox[Record]):
    """Writes sessions to one store. `server`: whose store it is, if it is one's."""

    def __init__(
        self,
        opener: Callable[[], LightningStore],
        name: str,
        store: LightningStore | None = None,
        server: Server | None = None,
    ) -> None:
        self.server = server
        self._open = opener
        self._given = store
        """Held, so that no other store gets its identity."""
        limits = {"batch": MOST_WAITING, "capacity": MOST_WAITING, "max_size": MOST_BYTES}
        super().__init__(name, patience=float("inf"), linger=LINGER_SECONDS, thread="agl-recorder", **limits)
        self._store, self._owns_store = store, store is None

    def reset(self) -> None:
        super().reset()
        self._store, self._owns_store = None, True
        self._open_sessions: dict[str, SessionRecord] = {}
        self.is_failing = False
        """Whether the last attempt to write has failed."""
        self._next_prune = 0.0
        """On time.monotonic."""

    # -- in the user's threads ---------------------------------------------------------------------------------------

    def begin(self, session: SessionRecord) -> bool:
        """Queue the start of a session. False, and it is counted, where nothing more can wait."""
        counters.add("sessions")
        return self.put([(session, None)])

    def finish(self, session: SessionRecord, end: SessionEnd) -> None:
        """Queue the end of a session; it is never dropped. A daemonic worker, as in `multiprocessing.Pool`, waits until
        it is written: SIGTERM may end it at any time."""
        self.put([(session, end)], always=True)
        if multiprocessing.current_process().daemon and not self.is_failing:
            self.flush(PENDING_SECONDS)

    def ensure_begun(self, session: SessionRecord) -> bool:
        """Wait a moment until the start of a session is in the store. Whether it is."""
        return session.in_store or (not self.is_failing and self.flush(BEGIN_SECONDS) and session.in_store)

    def size_of(self, item: Record) -> int:
        """Characters of text in the attributes: what spans of agents mostly consist of."""
        spans = item[1] if isinstance(item[1], Sequence) else ()
        return sum(len(value) for span in spans for value in span.attributes.values() if type(value) is str)

    def drop(self, items: Sequence[Record], why: str) -> None:
        counters.add("sessions_lost", sum(what is None for _, what in items))
        counters.add("spans_dropped", _count_spans(items))
        if self._closed:
            counters.warn("end", f"the process ends: nothing more is recorded in {self.name}")
        else:
            counters.warn("full", f"recording falls behind: {why} for {self.name}, and more are dropped")

    def leave(self, items: Sequence[Record], timeout: float) -> None:
        left = [item for item in items if not item[0].written]
        lost, spans = len({session.rollout_id for session, _ in left}), _count_spans(left)
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
            if self._owns_store and self._store is not None:
                with suppress(RuntimeError):  # at the end of the process, the store closes itself
                    await self._store.close()

    def take(self, batch: list[Record]) -> None:
        for session, what in batch:
            self._open_sessions[session.attempt_id] = session
            if session.process_id != os.getpid():  # its parent writes its start
                session.in_store = True
            session.add(what)

    async def send(self, batch: list[Record]) -> None:
        changed = [session for session in self._open_sessions.values() if session.is_changed]
        await StoreWriter(self._opened()).write(changed)
        self._open_sessions = {key: each for key, each in self._open_sessions.items() if each.end is None}
        if self.is_failing:
            counters.settle(f"store {self.name}")
            self.is_failing = False
        await self._prune()

    def is_temporary(self, error: Exception) -> bool:
        return True

    def retrying(self, error: Exception) -> None:
        self.is_failing = True
        if isinstance(error, StoreClosedError):  # the user has closed the store that they had given
            self._store, self._owns_store = None, True
        counters.warn(
            f"store {self.name}",
            f"sessions cannot be recorded in {self.name}: {error}. The program goes on; up to {MOST_WAITING} records"
            " wait until they can be written, and are counted by agentlightning.recording_status()",
        )

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                await StoreWriter(self._opened()).beat(list(self._open_sessions.values()))
            except Exception as error:  # noqa: BLE001  whatever fails here must not reach the user's code
                counters.warn("beat", f"the store {self.name} is not told that sessions go on: {error}")
            await self._prune()

    async def _prune(self) -> None:
        retention = current_settings().retention
        if retention is None or time.monotonic() < self._next_prune or self._closed:
            return
        self._next_prune = time.monotonic() + PRUNE_SECONDS
        try:
            await self._opened().prune(retention)
        except Exception as error:  # noqa: BLE001  whatever fails here must not reach the user's code
            counters.warn("prune", f"{self.name} cannot be pruned: {error}")

    def _opened(self) -> LightningStore:
        if self._store is None:
            self._store = self._open()
        return self._store


def _count_spans(items: Sequence[Record]) -> int:
    return sum(len(what) for _, what in items if isinstance(what, Sequence))


class SessionSink:
    """Passes the spans of a session on to its recorder, if it has one."""

    def __init__(self, session: SessionRecord, recorder: Recorder | None) -> None:
        self._session, self._recorder = session, recorder

    @property
    def server(self) -> Server | None:
        """The server that the session is recorded on, if it is."""
        return None if self._recorder is None else self._recorder.server

    def is_known(self) -> bool:
        """Whether the server knows the session, which a gateway on it needs to record its calls."""
        return self._recorder is not None and self._recorder.ensure_begun(self._session)

    def put(self, spans: Sequence[Span]) -> None:
        if self._recorder is not None:
            self._recorder.put([(self._session, spans)])

    def end(self, end: SessionEnd) -> None:
        if self._recorder is not None:
            self._recorder.finish(self._session, end)


# -- the recorders of this process -----------------------------------------------------------------------------------

_recorders: dict[object, Recorder] = {}
_lock = threading.Lock()
_installed = threading.Event()


def recorder_of(store: LightningStore | str | Path | None = None) -> Recorder:
    """The recorder of a store: of the one given or named, else of `LightningStore()` in the current directory.
    Raises ConfigError for anything else."""
    if store is None:
        key: object = (os.environ.get("AGL_STORE", ""), _directory())
    elif isinstance(store, str | Path):
        key = (str(store), _directory())
    elif isinstance(store, LightningStore):
        key = id(store)
    else:
        raise ConfigError(f"store={store!r:.80} is not a store; give LightningStore(...), a path or a URL")
    found = _recorders.get(key)
    if found is None:
        with _lock:
            found = _recorders.get(key)
            if found is None:
                _install()
                found = _recorders[key] = _new_recorder(store)
    return found


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def _new_recorder(store: LightningStore | str | Path | None) -> Recorder:
    if isinstance(store, LightningStore):
        url, token = getattr(store, "url", None), getattr(store, "token", None)
        return Recorder(_opener_like(store), repr(store), store, None if url is None else (url, token))
    place = str(store) if store is not None else os.environ.get("AGL_STORE") or ""
    if place.startswith(("http://", "https://")):
        return Recorder(lambda: _client(place, None), place, server=(place, os.environ.get("AGL_TOKEN") or None))
    if "://" not in place and place != ":memory:":
        place = str(Path(_directory(), Path(place or DEFAULT_STORE).expanduser()))
    return Recorder(lambda: LightningStore(place), place)


def _opener_like(store: LightningStore) -> Callable[[], LightningStore]:
    """Opens the same store again, in a child process."""
    path, url, token, shown = *(getattr(store, name, None) for name in ("path", "url", "token")), repr(store)
    if path is not None:
        return lambda: LightningStore(path)
    if url is not None:
        return lambda: _client(url, token)

    def refuse() -> LightningStore:
        raise ConfigError(f"{shown} cannot be opened in another process; give track_session a path or a URL instead")

    return refuse


def _client(url: str, token: str | None) -> LightningStore:
    from agentlightning.store.http.client import LightningStoreClient

    return LightningStoreClient(url, token, patience=PATIENCE)


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
    deadline = time.monotonic() + timeout
    done = [each.flush(max(0.0, deadline - time.monotonic())) for each in list(_recorders.values())]
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
        if isinstance(inside.sink, SessionSink):
            inside.sink.end(SessionEnd(time.time()))


def _install() -> None:
    """Flush before a store is opened, and at the end of this process and of its children."""
    if _installed.is_set():
        return
    _installed.set()
    atexit.register(_close_all)
    pending.register(_flush_pending)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    multiprocessing.util.register_after_fork(_installed, _in_worker)
    if multiprocessing.parent_process() is not None:
        _in_worker(None)


def _flush_pending() -> None:
    recorders = list(_recorders.values())
    if any(each.is_current_thread for each in recorders):
        return
    end_implicit()
    for each in recorders:
        if not each.is_failing:  # waiting would not help
            each.flush(PENDING_SECONDS)


def _close_all() -> None:
    end_implicit()
    for each in list(_recorders.values()):
        each.close(EXIT_SECONDS)


def _before_fork() -> None:
    """A child process continues the sessions of its parent: their rollouts must be in the store by then."""
    for each in list(_recorders.values()):
        each.flush(PENDING_SECONDS)


def _after_fork() -> None:
    counters.after_fork()
    implicit_sessions.clear()  # They are the parent's.


def _in_worker(_: object) -> None:
    """A worker of `multiprocessing` ends without `atexit`, whether its parent has recorded before or not."""
    multiprocessing.util.Finalize(_installed, _close_all, exitpriority=0)
