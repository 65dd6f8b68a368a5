"""Queries of spans: by rollout, by filters, page by page. See codec.py for what a pack holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import Final

from agentlightning.errors import NotFoundError
from agentlightning.span import DAMAGED, Span
from agentlightning.store import validation
from agentlightning.store.sql.sort_order import NATURAL, Order
from agentlightning.store.sql.spans import codec, token_blocks
from agentlightning.store.sql.tables import mapping, span_statements, statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.sql.tables.schema import MAX_PACK

FIRST_BATCH: Final = 4
"""Packs read at once at first: a page is often in one."""
PACK_BATCH: Final = 64
"""Packs read at once in the end."""
BATCH_WITHOUT_TOKENS: Final = 256
"""The same where their tokens are not read."""
SPANS_COLUMN: Final = [column.name for column in statements.ATTEMPT].index("spans")
NEWEST_BATCH: Final = 4
"""Packs read at once for the newest spans."""


class _ChainsOnDemand(dict[bytes, bytes]):
    """The prompt tokens that packs share, read when the first of them is needed."""

    def __init__(self, connection: Connection, rows: Sequence[Row], bodies: Sequence[bytes]) -> None:
        super().__init__()
        self._source = connection, rows, bodies

    def __missing__(self, head: bytes) -> bytes:
        if not self:
            self.update(read_chains(*self._source))
        found = self.get(head)
        if found is None:
            raise KeyError(head)
        return found


def unpack_rows(
    connection: Connection, rows: Sequence[Row], rollout_id: str, attempt_id: str, *, tokens: bool = True
) -> Iterator[list[Span]]:
    """The spans of each pack, from rows of `span_statements.PACK`, one after the other. Others stand for those of a
    pack that cannot be read (`span.DAMAGED`)."""
    bodies = [bytes(row[6]) for row in rows]
    chains = _ChainsOnDemand(connection, rows, bodies)
    for row, body in zip(rows, bodies, strict=True):
        try:
            yield codec.unpack(
                body,
                rollout_id=rollout_id,
                attempt_id=attempt_id,
                span_ids=codec.split_ids(bytes(row[5])),
                sequence_ids=range(row[2], row[2] + row[3]),
                superseded=bool(row[4]),
                chains=chains,
                tokens=tokens,
            )
        except mapping.UNREADABLE as error:
            what = f"a pack of {row[3]} spans of attempt {attempt_id!r} of rollout {rollout_id!r}"
            message = str(mapping.damaged(what, rollout_id, error))
            mapping.report(message)
            yield [
                Span(rollout_id, attempt_id, DAMAGED, 0.0, None, row[2] + index, "", span_id, None, "ERROR", message)
                for index, span_id in enumerate(_ids_of(row))
            ]


def _ids_of(row: Row) -> Sequence[str]:
    """The ids of the spans of a damaged pack, or names in place of ids that cannot be read."""
    with suppress(*mapping.UNREADABLE):
        found = codec.split_ids(bytes(row[5]))
        if len(found) == row[3]:
            return found
    return [f"damaged-{row[0]}-{index}" for index in range(row[3])]


def read_chains(connection: Connection, rows: Sequence[Row], bodies: Sequence[bytes]) -> dict[bytes, bytes]:
    """The prompt tokens that packs share, by the digest of their last block."""
    heads: dict[bytes, None] = {}
    keys: list[int] = []
    for row, body in zip(rows, bodies, strict=True):
        found = list[bytes]()
        with suppress(*mapping.UNREADABLE):  # of a damaged pack
            found = codec.heads_of(body)
        if found:
            heads.update(dict.fromkeys(found))
            keys.append(row[0])
    if not keys:
        return {}
    blocks = (
        (bytes(digest), bytes(parent), bytes(ids))
        for digest, parent, ids in connection.all(span_statements.BLOCKS_OF, keys)
    )
    return token_blocks.join_blocks(heads, blocks)


def spans_by_id(
    connection: Connection, attempt_key: int, rollout_id: str, attempt_id: str, span_ids: set[str]
) -> dict[str, Span]:
    """The spans of an attempt that have one of these ids."""
    rows = connection.all(span_statements.PACKS_WITH, attempt_key, list(span_ids))
    unpacked = unpack_rows(connection, rows, rollout_id, attempt_id)
    return {span.span_id: span for spans in unpacked for span in spans if span.span_id in span_ids}


def _has(name: str, value: str) -> Callable[[Span], bool]:
    field_of = attrgetter(name)
    return lambda span: field_of(span) == value


def _contains(name: str, part: str) -> Callable[[Span], bool]:
    field_of = attrgetter(name)
    return lambda span: part in (field_of(span) or "")


@dataclass(frozen=True, slots=True)
class SpanQuery:
    """The arguments of `query_spans`."""

    rollout_id: str
    attempt_id: str | None
    after: str | None
    limit: int
    offset: int
    exact: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """By field: the value it must have."""
    contains: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """By field: the text it must contain."""
    any_of: bool = False
    """Whether one of these filters is enough."""
    order: Order = NATURAL
    tokens: bool = True
    """Whether the tokens of model calls are read, or only their numbers."""

    @property
    def filters(self) -> list[Callable[[Span], bool]]:
        exact = [_has(name, value) for name, value in self.exact.items() if value is not None]
        return exact + [_contains(name, part) for name, part in self.contains.items() if part is not None]

    def page(self, spans: Iterable[Span]) -> list[Span]:
        """The page of these spans, which begin after the span `after`."""
        tests, enough = self.filters, any if self.any_of else all
        if not self.order.natural:
            matching = [span for span in spans if not tests or enough(test(span) for test in tests)]
            return self.order.page(matching, self.limit, self.offset)
        skip, found = self.offset, list[Span]()
        if self.limit == -1 and not skip and not tests:
            return list(spans)
        if self.limit == 0:
            return found
        for span in spans:
            if tests and not enough(test(span) for test in tests):
                continue
            if skip:
                skip -= 1
                continue
            found.append(span)
            if len(found) == self.limit:
                break
        return found


def query_spans(connection: Connection, query: SpanQuery) -> list[Span]:
    """Spans from the database, with few queries and memory bounded by the result."""
    attempts = attempts_of(connection, query.rollout_id, query.attempt_id)
    if query.after is None:
        return query.page(span for row in attempts for span in _stream(connection, query, row, None))
    index, position = _find(connection, attempts, query)
    rest = attempts[index:]
    positions = [position, *[None] * (len(rest) - 1)]
    return query.page(
        span for row, start in zip(rest, positions, strict=True) for span in _stream(connection, query, row, start)
    )


def attempts_of(connection: Connection, rollout_id: str, attempt_id: str | None) -> list[Row]:
    """Rows of `statements.ATTEMPT`."""
    rows = connection.all(statements.ATTEMPTS_OF, rollout_id)
    if not rows and not connection.all(statements.ROLLOUT_POSITION, rollout_id):
        raise NotFoundError(f"no rollout {rollout_id!r} in this store")
    if attempt_id is None:
        return rows
    if attempt_id == "latest":
        return rows[-1:]
    rows = [row for row in rows if row[3] == attempt_id]
    if not rows:
        raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
    return rows


Position = tuple[int, int, int]
"""Position of a span within its attempt: (sequence_id, key of its pack, index in the pack)."""


def _find(connection: Connection, attempts: Sequence[Row], query: SpanQuery) -> tuple[int, tuple[Position, int]]:
    """Where the span `after` is: (index of the attempt, (position, sequence number from which to read packs))."""
    keys = [attempt[0] for attempt in attempts]
    places = {row[1]: row for row in connection.all(span_statements.PLACE_OF, keys, query.after)}
    for index, key in enumerate(keys):
        if key in places:
            row = places[key]
            inner = codec.split_ids(bytes(row[5])).index(query.after or "")
            sequence_id = row[2] + inner
            ((start,),) = connection.all(span_statements.FIRST_AROUND, key, sequence_id - MAX_PACK, sequence_id)
            return index, ((sequence_id, row[0], inner), start)
    raise NotFoundError(f"rollout {query.rollout_id!r} has no span {query.after!r} to continue after")


def _stream(
    connection: Connection, query: SpanQuery, attempt: Row, after: tuple[Position, int] | None
) -> Iterator[Span]:
    """The spans of an attempt that follow a position, by sequence number. Packs whose numbers interleave are merged."""
    ahead: list[tuple[Position, Span]] = []
    position, start = after or (None, -1)
    packs = _packs(connection, query, attempt, start)
    following = next(packs, None)
    while following is not None:
        (row, spans), following = following, next(packs, None)
        while ahead and ahead[0][0][0] < row[2]:
            yield heappop(ahead)[1]
        alone = not ahead and (following is None or spans[-1].sequence_id < following[0][2])
        if alone and (position is None or row[2] > position[0]):
            yield from spans
            continue
        for index, span in enumerate(spans):
            here = (span.sequence_id, row[0], index)
            if position is None or here > position:
                heappush(ahead, (here, span))
    while ahead:
        yield heappop(ahead)[1]


def _packs(connection: Connection, query: SpanQuery, attempt: Row, start: int) -> Iterator[tuple[Row, list[Span]]]:
    skip, batch = 0, FIRST_BATCH
    while True:
        rows = connection.all(span_statements.PACKS_OF, attempt[0], start, batch, skip)
        unpacked = unpack_rows(connection, rows, query.rollout_id, attempt[3], tokens=query.tokens)
        yield from zip(rows, unpacked, strict=True)
        if len(rows) < batch:
            return
        batch = min(2 * batch, PACK_BATCH if query.tokens else BATCH_WITHOUT_TOKENS)
        last = rows[-1][2]
        skip = sum(row[2] == last for row in rows) + (skip if last == start else 0)
        start = last


def count_spans(connection: Connection, rollout_id: str, attempt_id: str) -> int:
    """The number of spans of an attempt, as its row has it."""
    return sum(row[SPANS_COLUMN] for row in attempts_of(connection, rollout_id, attempt_id))


def newest_spans(connection: Connection, limit: int) -> list[Span]:
    """The spans that were stored last, the newest first."""
    found: list[Span] = []
    key = validation.NO_LIMIT
    while len(found) < limit:
        rows = connection.all(span_statements.NEWEST_PACKS, key, NEWEST_BATCH)
        for row in rows:
            if len(found) >= limit:
                break
            found += reversed(next(unpack_rows(connection, [row], row[-2], row[-1])))
        if len(rows) < NEWEST_BATCH:
            break
        key = rows[-1][0]
    return found[:limit]


def latest_spans(connection: Connection, rollout_ids: list[str], *, tokens: bool = True) -> dict[str, list[Span]]:
    """The spans of the latest attempt of each rollout, by rollout."""
    spans: dict[str, list[Span]] = {rollout_id: [] for rollout_id in rollout_ids}
    owners = {
        key: (rollout_id, attempt_id)
        for rollout_id, key, attempt_id in connection.all(span_statements.LATEST_AMONG, list(spans))
    }
    by_attempt: dict[int, list[Row]] = {}
    for row in connection.all(span_statements.PACKS_AMONG, list(owners)):
        by_attempt.setdefault(row[1], []).append(row)
    for key, rows in by_attempt.items():
        rollout_id, attempt_id = owners[key]
        positions = [
            ((span.sequence_id, row[0], index), span)
            for row, found in zip(
                rows, unpack_rows(connection, rows, rollout_id, attempt_id, tokens=tokens), strict=True
            )
            for index, span in enumerate(found)
        ]
        positions.sort(key=lambda each: each[0])
        spans[rollout_id] = [span for _, span in positions]
    missing = [rollout_id for rollout_id, found in spans.items() if not found]
    if missing:
        known = {row[0] for row in connection.all(statements.KNOWN_AMONG, missing)}
        for rollout_id in missing:
            if rollout_id not in known:
                raise NotFoundError(f"no rollout {rollout_id!r} in this store")
    return spans
