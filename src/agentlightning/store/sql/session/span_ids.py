"""Cache of the span ids of recent attempts, by which a span that is sent twice is stored once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from agentlightning.store.sql.session.rows import AttemptRow
from agentlightning.store.sql.spans import codec
from agentlightning.store.sql.tables import span_statements
from agentlightning.store.sql.tables.backend import Connection

CACHE_BYTES: Final = 8 << 20
_ID_BYTES: Final = 120


class SpanIds:
    """The entry of an attempt is valid while the attempt has as many spans as when it was made. `flush` writes what is
    pending before the database is read."""

    def __init__(self, connection: Connection, flush: Callable[[], None]) -> None:
        self._connection = connection
        self._flush = flush
        self._entries: OrderedDict[int, tuple[int, set[str]]] = OrderedDict()
        """(number of spans, their ids) by attempt key."""
        self._bytes = 0

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def of(self, attempt: AttemptRow) -> set[str]:
        """Every span id of an attempt. Must come before the first change of a command."""
        entry = self._entries.get(attempt.key)
        if entry is not None and entry[0] == attempt.spans:
            return entry[1]
        ids: set[str] = set()
        if attempt.spans:
            self._flush()
            for (packed,) in self._connection.all(span_statements.IDS_OF, attempt.key):
                ids.update(codec.split_ids(bytes(packed)))
        self._put(attempt.key, attempt.spans, ids)
        return ids

    def add(self, attempt: AttemptRow, spans_before: int, ids: Sequence[str], named: bool) -> None:
        """Record spans that were added to an attempt that had `spans_before`. An entry is made only for callers that
        name their spans: others never ask."""
        entry = self._entries.get(attempt.key)
        if entry is None and not spans_before and named:
            self._put(attempt.key, attempt.spans, set(ids))
        elif entry is not None and entry[0] == spans_before:
            entry[1].update(ids)
            self._entries[attempt.key] = (attempt.spans, entry[1])
            self._bytes += _ID_BYTES * len(ids)

    def forget(self, attempt: AttemptRow) -> None:
        """Drop the entry of an attempt whose row is dropped: nobody has used either for long."""
        if (entry := self._entries.pop(attempt.key, None)) is not None:
            self._bytes -= _ID_BYTES * (2 + len(entry[1]))

    def _put(self, key: int, count: int, ids: set[str]) -> None:
        old = self._entries.pop(key, None)
        self._bytes += _ID_BYTES * (2 + len(ids)) - (0 if old is None else _ID_BYTES * (2 + len(old[1])))
        self._entries[key] = (count, ids)
        while self._bytes > CACHE_BYTES and len(self._entries) > 1:
            _, (_, evicted) = self._entries.popitem(last=False)
            self._bytes -= _ID_BYTES * (2 + len(evicted))
