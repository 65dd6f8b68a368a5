"""`Outbox`: the queue between what records spans and where they go, a store or a server; and what is counted as lost.

`put` appends, in any thread, and never blocks. One asyncio task sends what has gathered, in order and in batches: in an
event loop of its owner (`run`), or in a thread of the outbox, which begins with the first item. What the destination
cannot take now is sent again for `patience` seconds. A batch with something that it rejects is halved until only that
is left, which is repaired or dropped. What does not fit into the queue, was rejected, or could not be sent in time is
dropped: counted, and said once until something arrives again.

An item is done when the destination has acknowledged it or it was dropped. `flush` and `written` wait until all that
was put before is done. A child process made by `os.fork` begins with an empty queue; what waits is its parent's.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import islice
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakSet

from agentlightning.attempt_variables import PATIENCE, PATIENCE_SECONDS
from agentlightning.errors import StoreError, StoreFullError, StoreServerError
from agentlightning.span import Span
from agentlightning.util.random_ids import random_uniform

logger = logging.getLogger(__name__)
_recording = logging.getLogger("agentlightning.recording")

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

# -- trying again ------------------------------------------------------------------------------------------------------

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 5.0
"""Seconds between two tries; each pause is twice as long as the one before."""
WARN_EVERY_SECONDS: Final = 30.0


class Unavailable(Exception):
    """The destination cannot take anything now; `after`: in how many seconds it can, if it has said so."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Tries:
    """The tries of one operation, which end `patience` seconds from now."""

    def __init__(self, patience: float) -> None:
        self._end = time.monotonic() + patience
        self._pause = FIRST_PAUSE

    def pause(self, error: Exception | None = None) -> float | None:
        """Seconds to wait before the next try; None if there is none."""
        left = self._end - time.monotonic()
        if left <= 0:
            return None
        wanted = error.after if isinstance(error, Unavailable) else None
        pause = self._pause * random_uniform(0.8, 1.2) if wanted is None else wanted
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return min(pause, left)


class Retry:
    """Repeats operations of a store for up to `patience` seconds each, while it is full, busy or unreachable. They must
    be idempotent."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._last_warning = float("-inf")

    async def __call__(self, operation: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The operation's result. Raises its last error."""
        tries = Tries(self.patience)
        while True:
            try:
                return await operation(*args, **kwargs)
            except Exception as error:
                pause = tries.pause(error) if self.is_temporary(error) else None
                if pause is None:
                    raise
                self.failed(error)
            await self.sleep(pause)

    def is_temporary(self, error: Exception) -> bool:
        """Whether the operation may succeed later."""
        # Embedded stores raise a StoreError as such where their database is busy or cannot be reached.
        return isinstance(error, Unavailable) or type(error) in (StoreError, StoreFullError, StoreServerError)

    def failed(self, error: Exception) -> None:
        """Called before each pause: log it, now and then."""
        now = time.monotonic()
        if now - self._last_warning > WARN_EVERY_SECONDS:
            self._last_warning = now
            logger.warning("the store cannot be used, retrying for up to %g s: %s", self.patience, error)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


# -- the queue ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OutboxCounts:
    """Numbers of items, by outcome."""

    sent: int = 0
    dropped: int = 0
    """The queue was full, they could not be sent in time, or the destination rejects each of them."""
    refused: int = 0
    """The destination has answered that it did not take them."""


class Outbox(Retry, ABC, Generic[T]):
    """A subclass says how a batch is sent (`send`). `name`: where it goes, in warnings. A batch is sent when it is full
    or its first item has waited for `linger` seconds; a caller who waits sends it at once. With `thread`, the name of
    one, `put` starts it."""

    rejections: tuple[type[Exception], ...] = ()
    """What `send` raises for a batch that the destination does not take in this form."""

    def __init__(
        self,
        name: str,
        *,
        patience: float,
        batch: int = 1000,
        linger: float = 0.0,
        capacity: float = float("inf"),
        max_size: float = float("inf"),
        thread: str | None = None,
    ) -> None:
        super().__init__(patience)
        self.name, self.counts = name, OutboxCounts()
        self._batch, self._linger, self._capacity, self._max_size = batch, linger, capacity, max_size
        self._thread_name = thread
        self._warned = False
        self.reset()
        _outboxes.add(self)

    def reset(self) -> None:
        """Begin with an empty queue: lock, thread and items of a parent process are not ours."""
        self._lock = threading.RLock()  # a signal handler may emit, too
        self._waiting = deque[T]()
        """Items that are not done, with those that are being sent."""
        self._size = self._done = 0
        self._waiters = deque[tuple[int, Future[None]]]()
        """Each is done once so many items are."""
        self.is_closed = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    # -- what a subclass says ------------------------------------------------------------------------------------------

    @abstractmethod
    async def send(self, batch: list[T]) -> int | None:
        """Send items; how many of them the destination has answered that it did not take. May be called again with the
        same ones."""

    def take(self, batch: list[T]) -> None:
        """Called once for each batch, before it is sent."""

    def size_of(self, item: T) -> int:
        """What an item adds to the size of the queue, which `max_size` limits."""
        return 0

    def failed(self, error: Exception) -> None:
        """Called before each pause."""

    def repair(self, item: T) -> T:
        """A rejected item in a form that is taken, if it has one."""
        return item

    def give_up(self, batch: list[T], error: Exception) -> None:
        """The patience is over, or the error is none of those above. Raises what ends the outbox."""
        self.drop(batch, str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}")

    def drop(self, items: Sequence[T], why: str) -> None:
        """Count items that are lost, and say it."""
        self.counts.dropped += len(items)
        self.warn(f"{len(items)} spans for {self.name} are dropped: {why}")

    def leave(self, items: Sequence[T], timeout: float) -> None:
        """Drop what was not sent when the outbox was closed."""
        self.drop(items, f"not sent within {timeout:g} s of closing")

    def warn(self, message: str) -> None:
        """Log a loss; once, until something is sent."""
        if not self._warned:
            self._warned = True
            logger.warning("%s; further ones are only counted", message)

    # -- in any thread -------------------------------------------------------------------------------------------------

    def put(self, items: Sequence[T]) -> None:
        """Queue items, and drop those that do not fit."""
        self.offer(items)

    def offer(self, items: Sequence[T], always: bool = False) -> bool:
        """`put` that says whether all fit. `always`: queue them, whether they fit or not."""
        with self._lock:
            waiting = len(self._waiting)
            free = 0 if self._size >= self._max_size else max(0, self._capacity - waiting)
            room = 0 if self.is_closed else len(items) if always else int(min(len(items), free))
            taken = items if room == len(items) else items[:room]
            self._waiting.extend(taken)
            for item in taken:
                self._size += self.size_of(item)
            if self._thread is None and room and self._thread_name is not None:
                self._thread = threading.Thread(target=self._run_thread, name=self._thread_name, daemon=True)
                self._thread.start()
            if waiting == 0 or waiting < self._batch <= waiting + room:
                self._call(self._changed.set)
        if room == len(items):
            return True
        self.drop(items[room:], "it is closed" if self.is_closed else f"{waiting + room} wait already")
        return False

    @property
    def waiting(self) -> int:
        """Items that are not done."""
        return len(self._waiting)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the thread of this outbox."""
        return self._thread is threading.current_thread()

    def flush(self, timeout: float) -> bool:
        """Wait until all items put so far are done. False after `timeout` seconds."""
        return self.is_current_thread or bool(wait([self._all_done()], timeout).done)

    async def written(self) -> None:
        """Wait until all items put so far are done."""
        if self.waiting:
            await asyncio.wrap_future(self._all_done())

    def _all_done(self) -> Future[None]:
        """Done once all items put so far are."""
        done = Future[None]()
        with self._lock:
            if self._waiting:
                self._waiters.append((self._done + len(self._waiting), done))
                self._call(self._changed.set)
            else:
                done.set_result(None)
        return done

    def close(self, timeout: float = 5.0) -> bool:
        """Take nothing more, and send what waits within `timeout` seconds. What is left then is dropped: False.
        Idempotent."""
        with self._lock:
            self.is_closed = True
            self._call(self._changed.set)
            thread = self._thread
        if thread is not None and not self.is_current_thread:
            thread.join(timeout)
            if thread.is_alive():
                self._call(lambda: self._work.cancel())
                thread.join(0.5)
        with self._lock:
            left = list(self._waiting)
        self._settle(len(left))
        if left:
            self.leave(left, timeout)
        return not left

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function in the event loop: at once if that is the running one."""
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # none runs here
                if asyncio.get_running_loop() is loop:
                    function()
                    return
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(function)

    # -- in the task ---------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self.run())

    async def run(self) -> None:
        """Send until the outbox is closed and empty. Raises what `give_up` does."""
        self._work = cast("asyncio.Task[None]", asyncio.current_task())
        self._loop = asyncio.get_running_loop()
        try:
            while batch := await self._next_batch():
                self.take(batch)
                await self._deliver(batch)
        finally:
            self._loop = None

    async def _next_batch(self) -> list[T]:
        """Wait for a batch; empty once the outbox is closed."""
        await self._until(lambda: bool(self._waiting) or self.is_closed, None)
        if self._linger:
            await self._until(self._is_due, self._linger)
        with self._lock:
            return list(islice(self._waiting, self._batch))

    def _is_due(self) -> bool:
        return len(self._waiting) >= self._batch or bool(self._waiters) or self.is_closed

    async def _until(self, condition: Callable[[], bool], seconds: float | None) -> None:
        """Wait for a condition, at most so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    self._changed.clear()
                    if condition():
                        return
                    await self._changed.wait()

    async def _deliver(self, batch: list[T], repaired: bool = False) -> None:
        try:
            refused = await self(self.send, batch) or 0
        except self.rejections as error:
            return await self._deliver_parts(batch, error, repaired)
        except Exception as error:  # noqa: BLE001  the boundary: other batches are not to blame
            self.give_up(batch, error)
        else:
            self._warned = self._warned and refused > 0
            self.counts.refused += refused
            self.counts.sent += len(batch) - refused
        self._settle(len(batch))

    async def sleep(self, seconds: float) -> None:
        """A pause, which ends when somebody waits for what is in the queue."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _deliver_parts(self, batch: list[T], error: Exception, repaired: bool) -> None:
        """Send what is not rejected of a batch."""
        if len(batch) > 1:
            await self._deliver(batch[: len(batch) // 2])
            return await self._deliver(batch[len(batch) // 2 :])
        item: Any = batch[0]
        if not repaired and (better := self.repair(item)) != item:
            return await self._deliver([better], repaired=True)
        self.drop(batch, f"it rejects span {item.name!r} of attempt {item.attempt_id}: {error}")
        self._settle(1)

    def _settle(self, count: int) -> None:
        """The next items are done."""
        with self._lock:
            for _ in range(min(count, len(self._waiting))):  # none, if `close` has dropped them
                self._size -= self.size_of(self._waiting.popleft())
            self._done += count
            while self._waiters and self._waiters[0][0] <= self._done:
                with suppress(InvalidStateError):  # nobody waits any more
                    self._waiters.popleft()[1].set_result(None)


_outboxes = WeakSet[Outbox[Any]]()


def _after_fork() -> None:
    for outbox in list(_outboxes):
        outbox.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- what this process has recorded and lost ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordingStatus:
    """What this process has recorded so far.

    >>> from agentlightning.tracing.outbox import RecordingStatus
    >>> RecordingStatus().spans_dropped
    0
    """

    sessions: int = 0
    """Sessions that have begun."""
    sessions_implicit: int = 0
    """Those among them that `emit_*` has begun, outside of any other."""
    sessions_written: int = 0
    """Sessions whose end is in the store."""
    sessions_sampled_out: int = 0
    """Sessions that were not recorded, because of `sampling_rate`."""
    sessions_lost: int = 0
    """Sessions that are not, or not completely, in the store: it could not be opened, rejected them, or did not answer
    until the process ended."""
    spans_written: int = 0
    spans_dropped: int = 0
    """Spans that are not in the store: the queue was full, the store rejected them, a redaction hook failed, or the
    process ended."""
    redactions_failed: int = 0
    """Calls of the redaction hook that failed; what it was called for is not stored."""
    spans_unmarked: int = 0
    """Spans outside of `track_critical_path`, where only what is within is recorded."""
    prompts_unanswered: int = 0
    """Prompts of `emit_prompt` without a response."""
    responses_unprompted: int = 0
    """Responses of `emit_response` without a prompt."""
    waiting: int = 0
    """Records that are still to be written."""
    problem: str = ""
    """The last problem, as the warning said it; empty while there was none."""


class _Counters:
    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may emit, too
        self._counts: dict[str, int] = {}
        self._warned: set[str] = set()
        self._problem = ""

    def add(self, name: str, count: int = 1) -> None:
        with self.lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def warn(self, kind: str, message: str) -> None:
        """Log a problem. Later ones of the same kind are only counted, until `settle`."""
        with self.lock:
            self._problem = message
        self.note(kind, message)

    def note(self, kind: str, message: str) -> None:
        """Log what is no problem, once."""
        with self.lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            _recording.warning("%s", message)

    def settle(self, kind: str) -> bool:
        """The problem is over: the next one is logged again. True if there was one."""
        with self.lock:
            known = kind in self._warned
            self._warned.discard(kind)
            return known

    def status(self, waiting: int) -> RecordingStatus:
        with self.lock:
            return RecordingStatus(**self._counts, waiting=waiting, problem=self._problem)


counters = _Counters()


# -- programs outside of a runner's hosts ------------------------------------------------------------------------------

# They post spans over OTLP/HTTP before `emit_*` returns: a reward is in the store before the program can make its next
# call, and nothing is lost when it exits. While the server is away they wait for as long as the runner does. What
# cannot be delivered then makes the program fail: an attempt must not succeed without the reward that it was given.

TIMEOUT_SECONDS: Final = 10.0


class PostingSink:
    """Posts spans to the server at `address` with the key of their attempt, in the thread that emits them. Spans that
    the server rejects, or cannot receive within `patience` seconds (AGL_PATIENCE, else 60), raise StoreServerError,
    and the program ends with a non-zero exit code even if it goes on."""

    def __init__(self, address: str, key: str, patience: float | None = None) -> None:
        self._address, self._url = address, urlsplit(address)
        self._headers = {"Content-Type": "application/x-protobuf", "Authorization": f"Bearer {key}"}
        self._patience = _patience() if patience is None else patience
        self._open()

    def _open(self) -> None:
        """After a fork, lock and connection belong to the parent."""
        self._lock, self._process = threading.Lock(), os.getpid()
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        self._connection = kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_SECONDS)

    def put(self, spans: Sequence[Span]) -> None:
        # It imports protobuf, which most programs never need.
        from agentlightning.tracing.otlp.codec import encode

        body, tries = encode(spans).SerializeToString(), Tries(self._patience)
        if os.getpid() != self._process:
            self._open()
        with self._lock:
            problem = self._post(body, tries)
        if problem:
            names = ", ".join(sorted({span.name for span in spans}))
            lost = f"{len(spans)} spans ({names}) could not be sent to {self._address} and are lost: {problem}"
            _lost.append(lost)
            raise StoreServerError(lost)

    def _post(self, body: bytes, tries: Tries) -> str:
        """Post with retries; a description of the last problem, or "" if the server accepted the spans."""
        from agentlightning.tracing.otlp.codec import rejected_spans

        while True:
            try:
                self._connection.request("POST", f"{self._url.path}/v1/traces", body, self._headers)
                with self._connection.getresponse() as response:
                    status, answer, moved = response.status, response.read(), response.getheader("Location")
            except (OSError, HTTPException) as error:
                self._connection.close()
                problem = f"{type(error).__name__}: {error}"
            else:
                # A page that a proxy has answered with is no receipt, whatever its status.
                if status < 300 and (rejected := rejected_spans(answer)) is not None:
                    return f"{rejected[0]} were rejected: {rejected[1]}" if rejected[0] else ""
                problem = f"HTTP {status}: {f'to {moved}' if moved else answer[:200].decode(errors='replace')}"
                if status < 500 and status != 429:
                    return problem
            pause = tries.pause()
            if pause is None:
                return f"{problem} (for {self._patience:g} s, see {PATIENCE})"
            time.sleep(pause)


def _patience() -> float:
    with suppress(KeyError, ValueError):
        if (seconds := float(os.environ[PATIENCE])) >= 0:  # not NaN, which never ends
            return seconds
    return PATIENCE_SECONDS


_lost: list[str] = []
"""What this program has emitted in vain."""


@atexit.register
def _fail_if_lost() -> None:
    """A program that handles the exception of `emit_*` and goes on fails as well."""
    if _lost:
        print(f"error: {_lost[-1]}", file=sys.stderr)  # noqa: T201  the traceback that the runner stores ends with it
        sys.stdout.flush()
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)
