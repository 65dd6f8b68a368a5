"""A store that takes spans at once and writes them soon: in between they are in a file that outlives the process.

For those who record more often than a disk can say it is done, such as the gateway. `keep` appends to a journal beside
the database: what it has taken survives `kill -9`, though not yet a power failure. A moment later everything taken is
written to the store together, and flushed to the disk as all it holds. Every other call sees the store with all that
was taken before it. A journal that was left behind is written to the store when the next one is opened; spans that it
holds already are left as they are.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import orjson

from agentlightning.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreClosedError,
    StoreError,
    StoreFullError,
)
from agentlightning.span import Span, SpanEvent
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.observe import METHODS

try:
    import fcntl
except ImportError:  # Windows: there a file that is open cannot be removed by another process
    fcntl = None

logger = logging.getLogger(__name__)

TOGETHER_SECONDS: Final = 0.01
"""How long spans gather before they are written; less where somebody waits for them."""
MAX_TOGETHER: Final = 512
"""Spans written in one transaction."""
MAX_PENDING: Final = 16384
"""Spans that are taken and not written; above it `keep` waits."""
SEGMENT_BYTES: Final = 16 * 1024 * 1024
"""A file that is longer is followed by another."""
_LONGEST_PAUSE_SECONDS: Final = 5.0
_HEAD: Final = struct.Struct("<II")
"""Of a record: the length of its JSON and its CRC-32."""
_REFUSALS: Final = (ConfigError, ConflictError, NotFoundError)
"""What the store says of a span that it will never take."""


class Journal:
    """The files, as bytes. One process writes each; `directory` may be shared by several."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._number = 0
        self._segments: deque[_Segment] = deque()

    def append(self, record: bytes) -> None:
        """Raises StoreFullError where the disk has no room, StoreError where it cannot be written."""
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.size > SEGMENT_BYTES:
            segment = self._begin()
        try:
            segment.append(_HEAD.pack(len(record), zlib.crc32(record)) + record)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            kind = StoreFullError if full else StoreError
            raise kind(f"the journal {segment.path} cannot be written: {error.strerror}; make room there") from error

    def taken(self, count: int) -> None:
        """The last `append` held so many spans."""
        self._segments[-1].spans += count

    def written(self, count: int) -> None:
        """The next so many spans are in the store."""
        while count:
            segment = self._segments[0]
            done = min(count, segment.spans)
            segment.spans -= done
            count -= done
            if segment.spans == 0:
                if len(self._segments) == 1:
                    return segment.empty() if segment.size > SEGMENT_BYTES // 16 else None
                self._segments.popleft().remove()

    def close(self, keep: bool = False) -> None:
        """Remove the files; `keep` those that hold what is not written."""
        while self._segments:
            segment = self._segments.popleft()
            segment.close() if keep and segment.spans else segment.remove()

    def left_behind(self) -> Iterator[tuple[Path, list[bytes]]]:
        """Files of processes that are gone, with their records; each is removed when the next is asked for."""
        for path in sorted(self._stem.parent.glob(f"{self._stem.name}-*")):
            try:
                segment = _Segment(path, os.O_RDWR)
            except (BlockingIOError, FileNotFoundError):  # its process lives, or somebody else has just read it
                continue
            yield path, list(_records(path.read_bytes()))
            segment.remove()

    def _begin(self) -> _Segment:
        self._number += 1
        path = self._stem.with_name(f"{self._stem.name}-{os.getpid()}-{self._number}")
        try:
            segment = _Segment(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        except OSError as error:
            raise StoreError(f"the journal {path} cannot be made: {error.strerror}") from error
        self._segments.append(segment)
        return segment


class _Segment:
    """One file, locked while its process lives."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self.size = 0
        self.spans = 0
        """Those in it that are not written."""
        self._file = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise

    def append(self, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:] if done else data)
        except OSError:
            with suppress(OSError):  # what is left of the record does not fit its sum, and ends the file
                os.ftruncate(self._file, self.size)
            raise
        self.size += done

    def empty(self) -> None:
        os.ftruncate(self._file, 0)
        self.size = 0

    def close(self) -> None:
        os.close(self._file)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _records(data: bytes) -> Iterator[bytes]:
    """Up to the first that is not whole."""
    start = 0
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        record = data[start + _HEAD.size : start + _HEAD.size + length]
        if len(record) != length or zlib.crc32(record) != checksum:
            return
        yield record
        start += _HEAD.size + length


def _write(spans: Sequence[Span]) -> bytes:
    return orjson.dumps(spans)


def _read(record: bytes) -> list[Span]:
    return [
        Span(**given | {"events": tuple(SpanEvent(**event) for event in given["events"])})
        for given in orjson.loads(record)
    ]


class _Journaling(LightningStoreBase):
    """What all journaled stores share; the methods of the contract are made below."""

    def __init__(self, store: LightningStoreBase, stem: Path) -> None:
        self.store = store
        """The store that does the work."""
        self.on_written: Callable[[Sequence[Span]], None] = lambda spans: None
        """Told of spans that were kept, as the store has them."""
        self._journal = Journal(stem)
        self._pending: deque[Span] = deque()
        self._taken = 0
        self._written = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._trouble: StoreError | None = None
        self._writer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return repr(self.store)

    def iter_spans(self, rollout_ids: Sequence[str]) -> AsyncIterator[tuple[str, list[Span]]]:
        return self._iter_spans(rollout_ids)

    async def _iter_spans(self, rollout_ids: Sequence[str]) -> AsyncIterator[tuple[str, list[Span]]]:
        await self.flush()
        async for each in self.store.iter_spans(rollout_ids):
            yield each

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Take over what was left behind, and begin. Raises StoreError."""
        await _take_over(self.store, self._journal)
        self._writer = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Write what is pending, and remove the journal. What the store does not take stays in it."""
        if self._writer is None:
            return
        await self.flush()
        writer, self._writer = self._writer, None
        writer.cancel()
        await asyncio.wait({writer})
        self._journal.close(keep=bool(self._pending))

    # -- taking spans ----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Spans taken and not written yet."""
        return self._taken - self._written

    def keep(self, spans: Sequence[Span]) -> Awaitable[None] | None:
        """Take spans: None where that is done, else to be awaited. Raises StoreError where the disk or the store does
        not take them: while the store refuses to be written, so does this."""
        if self._trouble is not None:
            raise self._trouble
        if self._writer is None:
            raise StoreClosedError("the journal is closed")
        if self.pending > MAX_PENDING:
            return self._keep_later(spans)
        self._journal.append(_write(spans))
        self._journal.taken(len(spans))
        self._pending.extend(spans)
        self._taken += len(spans)
        self._wake.set()
        return None

    async def _keep_later(self, spans: Sequence[Span]) -> None:
        while self.pending > MAX_PENDING:
            await self._reach(self._written + 1)
            if self._trouble is not None:
                raise self._trouble
        self.keep(spans)

    async def flush(self) -> None:
        """Wait until all that was taken is in the store, or the store has refused it."""
        if self._taken != self._written:
            await self._reach(self._taken)

    async def _reach(self, count: int) -> None:
        if self._writer is None:
            return
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, reached))
        self._hurry.set()
        await reached

    # -- writing them ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        pause = 0.0
        while True:
            await self._wake.wait()
            if not self._waiting:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TOGETHER_SECONDS):
                        await self._hurry.wait()
            self._hurry.clear()
            try:
                while self._pending:
                    await self._write_some()
                self._wake.clear()
                pause, self._trouble = 0.0, None
            except StoreError as error:
                pause = min(_LONGEST_PAUSE_SECONDS, pause * 2 or 0.1)
                logger.error("%d spans wait in the journal, trying again in %g s: %s", self.pending, pause, error)
                self._trouble = error
            self._tell()
            if pause:
                await asyncio.sleep(pause)

    async def _write_some(self) -> None:
        spans = [self._pending[place] for place in range(min(len(self._pending), MAX_TOGETHER))]
        kept = await _add(self.store, spans)
        for _ in spans:
            self._pending.popleft()
        self._written += len(spans)
        self._journal.written(len(spans))
        self._tell()
        self.on_written(kept)

    def _tell(self) -> None:
        """Those who wait, that it is written, or that it could not be."""
        while self._waiting and (self._trouble is not None or self._waiting[0][0] <= self._written):
            _, reached = self._waiting.popleft()
            if not reached.done():
                reached.set_result(None)


async def _add(store: LightningStoreBase, spans: Sequence[Span]) -> list[Span]:
    try:
        return await store.add_many_spans(spans)
    except _REFUSALS as error:
        if len(spans) == 1:
            logger.error("the store does not take the span %s: %s", spans[0].span_id, error)
            return []
    return [kept for span in spans for kept in await _add(store, [span])]


async def _take_over(store: LightningStoreBase, journal: Journal) -> None:
    for path, records in journal.left_behind():
        spans = [span for record in records for span in _read(record)]
        for start in range(0, len(spans), MAX_TOGETHER):
            await _add(store, spans[start : start + MAX_TOGETHER])
        logger.info("took over %d spans from %s", len(spans), path)


def _after_flush(name: str) -> Callable[..., Any]:
    async def method(self: _Journaling, *arguments: Any, **options: Any) -> Any:
        if self.pending:
            await self.flush()
        return await getattr(self.store, name)(*arguments, **options)

    method.__name__ = name
    method.__doc__ = getattr(LightningStoreBase, name).__doc__
    return method


_JournaledStore: Any = type("JournaledStore", (_Journaling,), {name: _after_flush(name) for name in METHODS})

JournaledStore = _Journaling


def journaled(store: LightningStoreBase, database: Path) -> JournaledStore:
    """The store given, with a journal beside its database file. To be entered with `async with`."""
    return _JournaledStore(store, _stem(database))


async def take_over(store: LightningStoreBase) -> None:
    """Write to a store what processes that were killed left in journals beside its file, for those who open it without
    a journal of their own. Raises StoreError."""
    path: Path | None = getattr(store, "path", None)
    if path is not None:
        await _take_over(store, Journal(_stem(path)))


def _stem(database: Path) -> Path:
    return database.with_name(f"{database.name}-calls")
