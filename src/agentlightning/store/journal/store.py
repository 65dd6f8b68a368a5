"""A store with a write-ahead journal: takes spans at once and writes them to the store soon, in large transactions.

For producers that record more often than a disk can sync, such as the gateway. `append` writes to a journal beside the
database: what it has taken survives `kill -9`, though not yet a power failure. A moment later, all of the journal is
committed to the store together. Every other call flushes the journal first, so it sees all that was appended before. A
journal that a killed process left behind is written to the store by the next process that opens it; spans that the
store holds already are left as they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreClosedError, StoreError
from agentlightning.span import SUPERSEDED, Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.instrumented import METHODS
from agentlightning.store.journal.segments import Segments
from agentlightning.util.json_values import dumps

logger = logging.getLogger(__name__)

BATCH_SECONDS: Final = 0.01
"""How long records gather before they are written; less if a caller waits for them."""
MAX_BATCH: Final = 512
"""Records written in one transaction."""
MAX_PENDING: Final = 16384
"""Records appended and not written; above it, `append` waits."""
MAX_LOGGED: Final = 3
"""Rejected spans named in one line of the log."""
_MAX_RETRY_SECONDS: Final = 5.0
_REJECTIONS: Final = (ConfigError, ConflictError, NotFoundError)
"""What the store raises for a span that it will never take."""
_spans_decoder = msgspec.json.Decoder(list[Span])


class JournaledStore(LightningStoreBase):
    """Made by `with_journal`. The awaited methods of the contract are generated below."""

    def __init__(self, store: LightningStoreBase, stem: Path) -> None:
        self.store = store
        """The store that does the work."""
        self.on_superseded: Callable[[str, str], None] = lambda rollout_id, attempt_id: None
        """Called for superseded attempts whose spans were written."""
        self._segments = Segments(stem)
        self._pending: deque[Sequence[Span]] = deque()
        self._appended = 0
        self._written = 0
        self._flush_waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        """(number of written records that it waits for, future)"""
        self._has_pending = asyncio.Event()
        self._flush_requested = asyncio.Event()
        self._failure: StoreError | None = None
        self._writer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return repr(self.store)

    def iter_spans(self, rollout_ids: Sequence[str], tokens: bool = True) -> AsyncIterator[tuple[str, list[Span]]]:
        return self._iter_spans(rollout_ids, tokens)

    async def _iter_spans(self, rollout_ids: Sequence[str], tokens: bool) -> AsyncIterator[tuple[str, list[Span]]]:
        await self.flush()
        async for each in self.store.iter_spans(rollout_ids, tokens):
            yield each

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Recover journals that were left behind, and start. Raises StoreError."""
        await _recover(self.store, self._segments)
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
        self._segments.close(keep=bool(self._pending))

    # -- appending -------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Records appended and not written yet."""
        return self._appended - self._written

    def append(self, spans: Sequence[Span]) -> Awaitable[None] | None:
        """Append spans: None if that is done, else to be awaited. Raises StoreError if the disk or the store refuses
        them: while the store cannot be written, neither can the journal."""
        if self._failure is not None:
            raise self._failure
        if self._writer is None:
            raise StoreClosedError("the journal is closed")
        if self._appended - self._written > MAX_PENDING:
            return self._append_later(spans)
        self._segments.append(dumps(spans))
        self._pending.append(spans)
        self._appended += 1
        self._has_pending.set()
        return None

    async def _append_later(self, spans: Sequence[Span]) -> None:
        while self.pending > MAX_PENDING and self._writer is not None:
            await self._wait_until_written(self._written + 1)
            if self._failure is not None:
                raise self._failure
        self.append(spans)

    async def flush(self) -> None:
        """Wait until everything appended is in the store, or the store has rejected it."""
        if self._appended != self._written:
            await self._wait_until_written(self._appended)

    async def _wait_until_written(self, count: int) -> None:
        if self._writer is None:
            return
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flush_waiters.append((count, written))
        self._flush_requested.set()
        await written

    # -- writing to the store --------------------------------------------------------------------------------------

    async def _work(self) -> None:
        retry_seconds = 0.0
        while True:
            await self._has_pending.wait()
            # Also if more came during the last write: small transactions cost the callers the interpreter lock.
            if not self._flush_waiters and len(self._pending) < MAX_BATCH:
                with suppress(TimeoutError):
                    async with asyncio.timeout(BATCH_SECONDS):
                        await self._flush_requested.wait()
            self._flush_requested.clear()
            try:
                await self._write_batch()
                if not self._pending:
                    self._has_pending.clear()
                retry_seconds, self._failure = 0.0, None
            except Exception as error:  # the error boundary: waiters are released, and the write is retried
                retry_seconds = min(_MAX_RETRY_SECONDS, retry_seconds * 2 or 0.1)
                known = isinstance(error, StoreError)
                message = "%d records wait in the journal; retrying in %g s: %s"
                logger.error(message, self.pending, retry_seconds, error, exc_info=None if known else error)
                self._failure = error if isinstance(error, StoreError) else StoreError(f"the journal failed: {error}")
            self._release_waiters()
            if retry_seconds:
                await asyncio.sleep(retry_seconds)

    async def _write_batch(self) -> None:
        batch = [self._pending[index] for index in range(min(len(self._pending), MAX_BATCH))]
        superseded = await self._write(batch)
        for _ in batch:
            self._pending.popleft()
        self._written += len(batch)
        try:
            self._segments.written(len(batch))
        finally:
            self._release_waiters()
        for ids in superseded:
            self.on_superseded(*ids)

    async def _write(self, batch: Sequence[Sequence[Span]]) -> set[tuple[str, str]]:
        """Returns the ids of the superseded attempts among theirs."""
        stored, _ = await _add(self.store, [span for spans in batch for span in spans])
        return {(span.rollout_id, span.attempt_id) for span in stored if SUPERSEDED in span.attributes}

    def _release_waiters(self) -> None:
        """Wake those whose records are written; all of them after a failure."""
        while self._flush_waiters and (self._failure is not None or self._flush_waiters[0][0] <= self._written):
            _, written = self._flush_waiters.popleft()
            if not written.done():
                written.set_result(None)


async def _add(store: LightningStoreBase, spans: Sequence[Span]) -> tuple[list[Span], int]:
    """Returns the stored spans, and how many were rejected. Raises StoreError if the store cannot be written now."""
    with suppress(*_REJECTIONS):  # one of the spans is rejected
        return await store.add_many_spans(spans), 0
    # Each span on its own, but all at once: the store answers them in one transaction.
    results = await asyncio.gather(*(store.add_span(span) for span in spans), return_exceptions=True)
    stored: list[Span] = []
    rejected: list[str] = []
    for span, result in zip(spans, results, strict=True):
        if isinstance(result, Span):
            stored.append(result)
        elif isinstance(result, _REJECTIONS):
            rejected.append(f"{span.span_id} ({result})")
        else:
            raise result
    if rejected:
        named = ", ".join(rejected[:MAX_LOGGED]) + (", ..." if len(rejected) > MAX_LOGGED else "")
        logger.error("the store rejected %d of %d spans: %s", len(rejected), len(spans), named)
    return stored, len(rejected)


# -- recovery --------------------------------------------------------------------------------------------------------


async def _recover(store: LightningStoreBase, segments: Segments) -> None:
    """Write orphaned journals to the store. What the store rejects is set aside, so that it does not keep anyone from
    opening the store."""
    for path, records in segments.orphaned():
        try:
            spans = [span for record in records for span in _spans_decoder.decode(record)]
        except msgspec.MsgspecError as error:  # of another version
            logger.error("%d records cannot be decoded and are kept in %s: %s", len(records), _set_aside(path), error)
            continue
        rejected = 0
        for start in range(0, len(spans), MAX_BATCH):
            rejected += (await _add(store, spans[start : start + MAX_BATCH]))[1]
        logger.info("took over %d spans from %s", len(spans) - rejected, path)
        if rejected:
            logger.error(
                "%d of %d spans are refused, as those of another database would be; the records are kept in %s: once "
                "their database is back, name the file %s again",
                *(rejected, len(spans), _set_aside(path), path.name),
            )


def _set_aside(path: Path) -> Path:
    """Rename a file so that no journal recovers it."""
    aside = path.with_name(f"unread-{path.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"unread-{number}-{path.name}")
    return path.rename(aside)


async def recover_journals(store: LightningStoreBase) -> None:
    """Write what killed processes left in journals beside the store's file, for a store that is opened without a
    journal. Raises StoreError."""
    path: Path | None = getattr(store, "path", None)
    if path is not None:
        await _recover(store, Segments(_stem(path)))


# -- the generated methods -------------------------------------------------------------------------------------------


def _flush_first(name: str) -> Callable[..., Any]:
    async def method(self: JournaledStore, *arguments: Any, **options: Any) -> Any:
        if self.pending:
            await self.flush()
        return await getattr(self.store, name)(*arguments, **options)

    method.__name__ = name
    method.__doc__ = getattr(LightningStoreBase, name).__doc__
    return method


_Generated: Any = type("JournaledStore", (JournaledStore,), {name: _flush_first(name) for name in METHODS})


def with_journal(store: LightningStoreBase, database: Path) -> JournaledStore:
    """The store with a journal beside its database file. Enter it with `async with`."""
    return _Generated(store, _stem(database))


def _stem(database: Path) -> Path:
    return database.with_name(f"{database.name}-calls")
