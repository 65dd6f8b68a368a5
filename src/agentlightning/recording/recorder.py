"""The queue and the thread that bring sessions to a store.

The code that is recorded only appends to a queue. A thread writes what has gathered there: what arrives within a few
hundredths of a second becomes one transaction. While the store cannot be written, because its disk is full or no
server answers, the queue keeps what it can hold; beyond that it is dropped and counted. Nothing is raised into the
user's code.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing.util
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import ConfigError, StoreClosedError
from agentlightning.recording.records import HEARTBEAT_SECONDS, SessionEnd, SessionRecord
from agentlightning.recording.settings import current_settings
from agentlightning.recording.store_writer import StoreWriter
from agentlightning.span import Span
from agentlightning.store import pending
from agentlightning.store.base import DEFAULT_STORE, LightningStore
from agentlightning.tracing.scope import Speaker, end_implicit_scopes, implicit_sessions
from agentlightning.tracing.status import counters

LINGER_SECONDS: Final = 0.02
"""How long the thread waits for more before it writes."""
MOST_WAITING: Final = 50_000
"""Records that wait at most; later spans, and sessions that begin later, are dropped."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""Characters of text in their attributes, at most."""
RETRY_SECONDS: Final = (0.1, 0.5, 2.0, 5.0, 15.0)
"""Pauses while the store cannot be written; the last one repeats."""
PRUNE_SECONDS: Final = 600.0
"""How often old rollouts are removed, where there is a retention."""
EXIT_SECONDS: Final = 10.0
"""How long the end of the process is delayed for what is still to be written."""
PENDING_SECONDS: Final = 5.0
BEGIN_SECONDS: Final = 2.0
"""How long the first model call of a session waits for its start to be written, so that the gateway knows it."""
PATIENCE_SECONDS: Final = 2.0
"""How long one call waits for a server that does not answer."""

Item = tuple["SessionRecord | None", "Sequence[Span] | SessionEnd | threading.Event | None"]
"""A session that has begun (None), spans of it, its end; or, without a session, an event to set once all before it is
written."""


class Recorder:
    """Writes sessions to one store, in a thread of its own that starts with the first one."""

    def __init__(
        self,
        opener: Callable[[], LightningStore],
        name: str,
        store: LightningStore | None = None,
        server: tuple[str, str | None] | None = None,
    ) -> None:
        self.name = name
        self.server = server
        """(URL, access token) of the server whose store it is, if it is one's."""
        self._open = opener
        self._given = store
        """Held, so that no other store gets its identity."""
        self._store = store
        self._owns_store = store is None
        self._reset()

    def _reset(self) -> None:
        self._queue: deque[Item] = deque()
        self._arrived = threading.Event()
        self._urgent = threading.Event()
        self._flushes: list[threading.Event] = []
        self._size = 0
        """Characters of text that wait."""
        self._taken_size = 0
        self._size_lock = threading.Lock()
        self._taken = 0
        """Records that were taken from the queue and are being written."""
        self._open_sessions: dict[str, SessionRecord] = {}
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopping = False
        self._failures = 0
        self._next_prune = 0.0
        """On time.monotonic."""

    # -- in the user's threads ---------------------------------------------------------------------------------------

    def begin(self, session: SessionRecord) -> bool:
        """Queue the start of a session. False, and it is counted, where nothing more can wait."""
        counters.add("sessions")
        if self._is_full():
            counters.add("sessions_lost")
            return False
        self._append((session, None))
        return True

    def put(self, session: SessionRecord, spans: Sequence[Span]) -> None:
        """Queue spans of a session."""
        if self._is_full():
            counters.add("spans_dropped", len(spans))
            return
        size = _size_of(spans)
        with self._size_lock:
            self._size += size
        self._append((session, spans))

    def _is_full(self) -> bool:
        if self._stopping:
            counters.warn("end", f"the process ends: nothing more is recorded in {self.name}")
            return True
        if len(self._queue) < MOST_WAITING and self._size < MOST_BYTES:
            return False
        counters.warn(
            "full", f"recording falls behind: {len(self._queue)} records wait for {self.name}, and more are dropped"
        )
        return True

    def finish(self, session: SessionRecord, end: SessionEnd) -> None:
        """Queue the end of a session; it is never dropped. A daemonic worker, as in `multiprocessing.Pool`, waits until
        it is written: SIGTERM may end it at any time."""
        self._append((session, end))
        if multiprocessing.current_process().daemon and not self.is_failing:
            self.flush(PENDING_SECONDS)

    def _append(self, item: Item) -> None:
        self._queue.append(item)
        if not self._arrived.is_set():
            self._arrived.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agl-recorder", daemon=True)
                self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._taken

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the thread of this recorder."""
        return self._thread is threading.current_thread()

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to write has failed."""
        return self._failures > 0

    def ensure_begun(self, session: SessionRecord) -> bool:
        """Wait a moment until the start of a session is in the store. Whether it is."""
        return session.in_store or (not self.is_failing and self.flush(BEGIN_SECONDS) and session.in_store)

    def flush(self, timeout: float) -> bool:
        """Wait until what was queued so far is in the store, or dropped. False after `timeout` seconds."""
        if self.waiting == 0 or self._thread is None or self.is_current_thread:
            return True
        done = threading.Event()
        self._queue.append((None, done))
        self._urgent.set()
        self._arrived.set()
        return done.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Write what is waiting, end the thread and close the store. What could not be written is counted."""
        timeout = EXIT_SECONDS if timeout is None else timeout
        written = self.flush(timeout)
        thread, self._stopping = self._thread, True
        self._urgent.set()
        self._arrived.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout if written else 0.5)
        if not written:
            self._give_up()

    def _give_up(self) -> None:
        unwritten = list(self._open_sessions.values())
        queued = list(self._queue)
        lost = {session.rollout_id for session, _ in queued if session is not None}
        lost |= {each.rollout_id for each in unwritten if each.spans or each.end is not None or not each.in_store}
        spans = sum(len(session.spans) for session in unwritten)
        spans += sum(len(what) for _, what in queued if isinstance(what, Sequence))
        counters.add("sessions_lost", len(lost))
        counters.add("spans_dropped", spans)
        counters.warn(
            "exit", f"recording ends with {len(lost)} sessions ({spans} spans) that could not be written to {self.name}"
        )

    def before_fork(self) -> None:
        """A child process continues the sessions of its parent: their rollouts must be in the store by then."""
        self.flush(PENDING_SECONDS)

    def after_fork(self) -> None:
        """In a child process: thread, locks and connections belong to the parent."""
        self._store, self._owns_store = None, True
        self._reset()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            last_beat = time.monotonic()
            while not (self._stopping and not self._queue):
                self._arrived.wait(HEARTBEAT_SECONDS)
                if not self._stopping:
                    self._urgent.wait(LINGER_SECONDS)
                self._arrived.clear()
                self._take()
                if self._attempt(runner, self._write):
                    self._forget_size()
                    self._taken = 0
                    self._forget_finished()
                    self._finish_flushes()
                if time.monotonic() - last_beat >= HEARTBEAT_SECONDS:
                    self._attempt(runner, self._beat)
                    last_beat = time.monotonic()
                if self._is_prune_due():
                    runner.run(self._prune())
            if self._owns_store and self._store is not None:
                with suppress(RuntimeError):  # at the end of the process, the store closes itself
                    runner.run(self._store.close())

    def _take(self) -> None:
        """Move what is queued to its sessions."""
        for _ in range(len(self._queue)):
            session, what = self._queue.popleft()
            if isinstance(what, threading.Event):
                self._flushes.append(what)
                continue
            assert session is not None
            self._taken += 1
            self._open_sessions[session.attempt_id] = session
            if session.process_id != os.getpid():  # its parent writes its start
                session.in_store = True
            if what is None:
                session.begin()
            elif isinstance(what, SessionEnd):
                session.finish(what)
            else:
                self._taken_size += _size_of(what)
                session.add_spans(what)

    def _forget_size(self) -> None:
        with self._size_lock:
            self._size -= self._taken_size
        self._taken_size = 0

    def _attempt(self, runner: asyncio.Runner, work: Callable[[], Any]) -> bool:
        """Do the work until the store takes it. False if the process ends before."""
        while True:
            try:
                runner.run(work())
            except Exception as error:  # noqa: BLE001  whatever fails here must not reach the user's code
                if not self._pause(error):
                    return False
            else:
                if self._failures:
                    counters.settle(f"store {self.name}")
                    self._failures = 0
                return True

    def _pause(self, error: Exception) -> bool:
        """Wait after a failure. False if the process is about to end."""
        if isinstance(error, StoreClosedError):  # the user has closed the store that they had given
            self._store, self._owns_store = None, True
        counters.warn(
            f"store {self.name}",
            f"sessions cannot be recorded in {self.name}: {error}. The program goes on; up to {MOST_WAITING} records"
            " wait until they can be written, and are counted by agentlightning.recording_status()",
        )
        pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        deadline = time.monotonic() + pause
        while (left := deadline - time.monotonic()) > 0:
            if self._stopping:
                return False
            time.sleep(min(left, 0.05))
        return not self._stopping

    async def _write(self) -> None:
        sessions = list(self._open_sessions.values())
        changed = [s for s in sessions if s.spans or s.end is not None or not s.in_store]
        if changed:
            await StoreWriter(self._opened()).write(changed)

    async def _beat(self) -> None:
        if self._open_sessions:
            await StoreWriter(self._opened()).beat(list(self._open_sessions.values()))

    def _is_prune_due(self) -> bool:
        return current_settings().retention is not None and time.monotonic() >= self._next_prune

    async def _prune(self) -> None:
        retention, self._next_prune = current_settings().retention, time.monotonic() + PRUNE_SECONDS
        if retention is None or self._stopping:
            return
        try:
            await self._opened().prune(retention)
        except Exception as error:  # noqa: BLE001  whatever fails here must not reach the user's code
            counters.warn("prune", f"{self.name} cannot be pruned: {error}")

    def _opened(self) -> LightningStore:
        if self._store is None:
            self._store = self._open()
        return self._store

    def _forget_finished(self) -> None:
        over = [key for key, session in self._open_sessions.items() if session.end is not None]
        for key in over:
            del self._open_sessions[key]

    def _finish_flushes(self) -> None:
        self._urgent.clear()
        while self._flushes:
            self._flushes.pop().set()


class SessionSink:
    """Passes the spans of a session on to its recorder, if it has one."""

    def __init__(self, session: SessionRecord, recorder: Recorder | None) -> None:
        self._session, self._recorder = session, recorder

    @property
    def server(self) -> tuple[str, str | None] | None:
        """(URL, access token) of the server that the session is recorded on, if it is."""
        return None if self._recorder is None else self._recorder.server

    def is_known(self) -> bool:
        """Whether the server knows the session, which a gateway on it needs to record its calls."""
        return self._recorder is not None and self._recorder.ensure_begun(self._session)

    def put(self, spans: Sequence[Span]) -> None:
        if self._recorder is not None:
            self._recorder.put(self._session, spans)

    def end(self, end: SessionEnd) -> None:
        if self._recorder is not None:
            self._recorder.finish(self._session, end)


def _size_of(spans: Sequence[Span]) -> int:
    """Characters of text in the attributes: what spans of agents mostly consist of."""
    return sum(len(value) for span in spans for value in span.attributes.values() if type(value) is str)


# -- the recorders of this process -----------------------------------------------------------------------------------

_recorders: dict[object, Recorder] = {}
_lock = threading.Lock()


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

    return LightningStoreClient(url, token, patience=PATIENCE_SECONDS)


def flush_all(timeout: float) -> bool:
    """Flush every recorder. False if one of them was not done in time."""
    end_implicit()
    deadline = time.monotonic() + timeout
    done = [each.flush(max(0.0, deadline - time.monotonic())) for each in list(_recorders.values())]
    return all(done)


def waiting() -> int:
    return sum(each.waiting for each in list(_recorders.values()))


def _install() -> None:
    """Flush before a store is opened, and at the end of this process and of its children."""
    if _recorders or _installed.is_set():
        return
    _installed.set()
    atexit.register(_close_all)
    pending.register(_flush_pending)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    multiprocessing.util.register_after_fork(_installed, _in_worker)
    if multiprocessing.parent_process() is not None:
        _in_worker(None)


_installed = threading.Event()


def _flush_pending() -> None:
    recorders = list(_recorders.values())
    if any(each.is_current_thread for each in recorders):
        return
    end_implicit()
    for each in recorders:
        if not each.is_failing:  # waiting would not help
            each.flush(PENDING_SECONDS)


def end_implicit(*speakers: Speaker) -> None:
    """End the implicit sessions of these tasks and threads, of all without any, so that readers find them finished."""
    for inside in end_implicit_scopes(speakers):
        if isinstance(inside.sink, SessionSink):
            inside.sink.end(SessionEnd(time.time()))


def _close_all() -> None:
    end_implicit()
    for each in list(_recorders.values()):
        each.close()


def _before_fork() -> None:
    for each in list(_recorders.values()):
        each.before_fork()


def _after_fork() -> None:
    counters.after_fork()
    implicit_sessions.clear()  # They are the parent's.
    for each in list(_recorders.values()):
        each.after_fork()


def _in_worker(_: object) -> None:
    """A worker of `multiprocessing` ends without `atexit`, whether its parent has recorded before or not."""
    multiprocessing.util.Finalize(_installed, _close_all, exitpriority=0)
