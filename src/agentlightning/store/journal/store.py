"""A store that takes spans at once and writes them soon: in between they are in a file that outlives the process.

For those who record more often than a disk can say it is done, such as the gateway. `keep` appends to a journal beside
the database: what it has taken survives `kill -9`, though not yet a power failure. A moment later everything taken is
written to the store together, and flushed to the disk as all it holds. Every other call sees the store with all that
was taken before it. A journal that was left behind is written to the store when the next one is opened; spans that it
holds already are left as they are.

Whoever has no time to make spans gives `keep_record` something that spans can be made of, and the journal a way to
`read` it. Where many come, a `Packer` may do that in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self, runtime_checkable

import orjson

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreClosedError, StoreError
from agentlightning.span import SUPERSEDED, Span, SpanEvent
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.instrumented import METHODS
from agentlightning.store.journal.segments import Segments
from agentlightning.store.sql.spans.attempt_spans import PackedSpans, pack_spans

logger = logging.getLogger(__name__)

TOGETHER_SECONDS: Final = 0.01
"""How long records gather before they are written; less where somebody waits for them."""
MAX_TOGETHER: Final = 512
"""Records written in one transaction."""
MAX_PENDING: Final = 16384
"""Records that are taken and not written; above it `keep` waits."""
MAX_NAMED: Final = 3
"""Spans that were refused, in one line of the log."""
_LONGEST_PAUSE_SECONDS: Final = 5.0
_SPANS: Final = b"["
"""A record that begins so is spans as JSON."""
_REFUSALS: Final = (ConfigError, ConflictError, NotFoundError)
"""What the store says of a span that it will never take."""

Read = Callable[[bytes], list[Span]]
"""Makes the spans of a record that `keep_record` was given. Raises ValueError for one of another version only."""


class Packer(Protocol):
    """Packs the spans of records elsewhere."""

    async def pack(self, records: Sequence[bytes]) -> list[PackedSpans] | None:
        """In their order. None: they are better packed here, as they are few, or it failed."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class TakesPacks(Protocol):
    """A store that takes spans as they are packed."""

    async def add_packs(self, packed: Sequence[PackedSpans]) -> list[tuple[str, str]]:
        """As `add_many_spans`; returns the (rollout_id, attempt_id) of superseded attempts among theirs."""
        ...


class _Taken(NamedTuple):
    """A record that is not written yet."""

    record: bytes
    spans: Sequence[Span] | None
    """Those it is made of, where they are known."""


class _Journaling(LightningStoreBase):
    """What all journaled stores share; the methods of the contract are made below."""

    def __init__(
        self, store: LightningStoreBase, stem: Path, read: Read | None = None, packer: Packer | None = None
    ) -> None:
        self.store = store
        """The store that does the work."""
        self.on_superseded: Callable[[str, str], None] = lambda rollout_id, attempt_id: None
        """Told of attempts that were superseded and have written spans since."""
        self._read = read
        self._packer = packer if isinstance(store, TakesPacks) else None
        self._segments = Segments(stem)
        self._pending: deque[_Taken] = deque()
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
        await _take_over(self.store, self._segments, self._read)
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
        if self._packer is not None:
            await self._packer.close()
        self._segments.close(keep=bool(self._pending))

    # -- taking records --------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Records taken and not written yet."""
        return self._taken - self._written

    @property
    def keeps_records(self) -> bool:
        """Whether there is a way to read what `keep_record` takes."""
        return self._read is not None

    def keep(self, spans: Sequence[Span]) -> Awaitable[None] | None:
        """Take spans: None where that is done, else to be awaited. Raises StoreError where the disk or the store does
        not take them: while the store refuses to be written, so does this."""
        return self._take(_Taken(orjson.dumps(spans), spans))

    def keep_record(self, record: bytes) -> Awaitable[None] | None:
        """The same for something that spans can be made of. It does not begin with `[`."""
        return self._take(_Taken(record, None))

    def _take(self, taken: _Taken) -> Awaitable[None] | None:
        if self._trouble is not None:
            raise self._trouble
        if self._writer is None:
            raise StoreClosedError("the journal is closed")
        if self._taken - self._written > MAX_PENDING:
            return self._take_later(taken)
        self._segments.append(taken.record)
        self._pending.append(taken)
        self._taken += 1
        self._wake.set()
        return None

    async def _take_later(self, taken: _Taken) -> None:
        while self.pending > MAX_PENDING and self._writer is not None:
            await self._reach(self._written + 1)
            if self._trouble is not None:
                raise self._trouble
        self._take(taken)

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
            # Also where more came while the last were written: small transactions cost the callers the interpreter.
            if not self._waiting and len(self._pending) < MAX_TOGETHER:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TOGETHER_SECONDS):
                        await self._hurry.wait()
            self._hurry.clear()
            try:
                await self._write_some()
                if not self._pending:
                    self._wake.clear()
                pause, self._trouble = 0.0, None
            except Exception as error:  # the boundary: whatever it is, those who wait are told, and it is tried again
                pause = min(_LONGEST_PAUSE_SECONDS, pause * 2 or 0.1)
                known = isinstance(error, StoreError)
                message = "%d records wait in the journal, trying again in %g s: %s"
                logger.error(message, self.pending, pause, error, exc_info=None if known else error)
                self._trouble = error if isinstance(error, StoreError) else StoreError(f"the journal failed: {error}")
            self._tell()
            if pause:
                await asyncio.sleep(pause)

    async def _write_some(self) -> None:
        some = [self._pending[place] for place in range(min(len(self._pending), MAX_TOGETHER))]
        superseded = await self._add(some)
        for _ in some:
            self._pending.popleft()
        self._written += len(some)
        try:
            self._segments.written(len(some))
        finally:
            self._tell()
        for ids in superseded:
            self.on_superseded(*ids)

    async def _add(self, some: Sequence[_Taken]) -> set[tuple[str, str]]:
        """Returns the ids of superseded attempts among theirs."""
        if self._packer is not None:
            packed = await self._packer.pack([taken.record for taken in some])
            if packed is not None and isinstance(self.store, TakesPacks):
                with suppress(*_REFUSALS):  # of one of them: those that can be are written below
                    return set(await self.store.add_packs(packed))
        spans = [span for taken in some for span in taken.spans or _spans_of(taken.record, self._read)]
        kept, _ = await _add(self.store, spans)
        return {(span.rollout_id, span.attempt_id) for span in kept if SUPERSEDED in span.attributes}

    def _tell(self) -> None:
        """Those who wait, that it is written, or that it could not be."""
        while self._waiting and (self._trouble is not None or self._waiting[0][0] <= self._written):
            _, reached = self._waiting.popleft()
            if not reached.done():
                reached.set_result(None)


def pack_records(records: Sequence[bytes], read: Read) -> list[PackedSpans]:
    """What a `Packer` makes of records."""
    return pack_spans([span for record in records for span in _spans_of(record, read)])


def _spans_of(record: bytes, read: Read | None) -> list[Span]:
    if not record.startswith(_SPANS):
        if read is None:
            raise StoreError("a journal holds records that nobody here can read; open it with `agl serve`")
        return read(record)
    return [
        Span(**given | {"events": tuple(SpanEvent(**event) for event in given["events"])})
        for given in orjson.loads(record)
    ]


async def _add(store: LightningStoreBase, spans: Sequence[Span]) -> tuple[list[Span], int]:
    """Those that are in the store, and how many it has refused. Raises StoreError where it can take none now."""
    with suppress(*_REFUSALS):  # of one of them perhaps
        return await store.add_many_spans(spans), 0
    # Each for itself, and all at once: the store answers them in one transaction.
    answers = await asyncio.gather(*(store.add_span(span) for span in spans), return_exceptions=True)
    kept: list[Span] = []
    refused: list[str] = []
    for span, answer in zip(spans, answers, strict=True):
        if isinstance(answer, Span):
            kept.append(answer)
        elif isinstance(answer, _REFUSALS):
            refused.append(f"{span.span_id} ({answer})")
        else:
            raise answer
    if refused:
        named = ", ".join(refused[:MAX_NAMED]) + (", ..." if len(refused) > MAX_NAMED else "")
        logger.error("the store does not take %d of %d spans: %s", len(refused), len(spans), named)
    return kept, len(refused)


async def _take_over(store: LightningStoreBase, segments: Segments, read: Read | None) -> None:
    """Whatever is not in the store afterwards is set aside: nobody is kept from opening the store by it."""
    for path, records in segments.left_behind():
        try:
            spans = [span for record in records for span in _spans_of(record, read)]
        except ValueError as error:
            logger.error("%d records cannot be read, and are kept in %s: %s", len(records), _set_aside(path), error)
            continue
        refused = 0
        for start in range(0, len(spans), MAX_TOGETHER):
            refused += (await _add(store, spans[start : start + MAX_TOGETHER]))[1]
        logger.info("took over %d spans from %s", len(spans) - refused, path)
        if refused:
            logger.error(
                "%d of %d spans are refused, as those of another database would be; the records are kept in %s: once "
                "their database is back, name the file %s again",
                *(refused, len(spans), _set_aside(path), path.name),
            )


def _set_aside(path: Path) -> Path:
    """Under a name that no journal reads."""
    aside = path.with_name(f"unread-{path.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"unread-{number}-{path.name}")
    return path.rename(aside)


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


def journaled(
    store: LightningStoreBase, database: Path, read: Read | None = None, packer: Packer | None = None
) -> JournaledStore:
    """The store given, with a journal beside its database file. To be entered with `async with`, which closes the
    packer."""
    return _JournaledStore(store, _stem(database), read, packer)


async def take_over(store: LightningStoreBase, read: Read | None = None) -> None:
    """Write to a store what processes that were killed left in journals beside its file, for those who open it without
    a journal of their own. Raises StoreError."""
    path: Path | None = getattr(store, "path", None)
    if path is not None:
        await _take_over(store, Segments(_stem(path)), read)


def _stem(database: Path) -> Path:
    return database.with_name(f"{database.name}-calls")
