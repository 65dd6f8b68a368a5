"""The table of answered calls: what was done under an idempotency key, written with what the call itself wrote.

Rows are kept for KEPT_SECONDS and within KEPT_BYTES; the oldest go first, a few with every TRIM_EVERY that come. Their
bytes are counted in the table `counts`, so that nothing has to be added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import ConflictError
from agentlightning.store.idempotency import AlreadyAnsweredError
from agentlightning.store.sql.counters import ANSWERED_BYTES
from agentlightning.store.sql.tables import statements

if TYPE_CHECKING:
    from agentlightning.store.sql.commands.base import Call
    from agentlightning.store.sql.execution.unit_of_work import Unit

KEPT_SECONDS: Final = 86_400.0
KEPT_BYTES: Final = 64 << 20
ROW_BYTES: Final = 200
"""What a row takes beside its answer, with its place in two indexes, about."""
TRIM_EVERY: Final = 64
TRIM_AT_ONCE: Final = 256


class AnsweredCalls:
    """Those of one transaction: what was answered before, and what is answered now."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[bytes, bytes | None]] = {}
        self._now: dict[str, tuple[bytes, bytes | None]] = {}
        self._since_trim = 0

    def clear(self) -> None:
        self._before.clear()
        self._now.clear()

    def load(self, unit: Unit, keys: Iterable[str]) -> None:
        for key, digest, answer in unit.connection.all(statements.FIND_ANSWERED, list(keys)):
            self._before[key] = (digest, answer)

    def run(self, call: Call, work: Callable[[Unit], Any], unit: Unit) -> Any:
        """What `work` returns. Raises AlreadyAnsweredError where it was done before, ConflictError where that had
        other arguments. What raises is not remembered: it did nothing."""
        once = call.idempotent
        assert once is not None
        known = self._before.get(once.key) or self._now.get(once.key)
        if known is None:
            result = work(unit)
            self._now[once.key] = (once.digest, once.encoded(result if call.finish is None else call.finish(result)))
            return result
        digest, answer = known
        if digest != once.digest:
            raise ConflictError(
                "this idempotency key was used for a call with other arguments; use a new key for each call, and the "
                "same one only to repeat it"
            )
        raise AlreadyAnsweredError(answer)

    def write(self, unit: Unit) -> None:
        """Last in a transaction."""
        if not self._now:
            return
        rows = [(key, digest, unit.wall, answer) for key, (digest, answer) in sorted(self._now.items())]
        self._now.clear()
        unit.connection.insert(statements.INSERT_ANSWERED, rows)
        unit.pending.counts.add(ANSWERED_BYTES, sum([_size(answer) for *_, answer in rows]))
        self._since_trim += len(rows)
        if self._since_trim >= TRIM_EVERY:
            self._since_trim = 0
            self._trim(unit)

    def _trim(self, unit: Unit) -> None:
        connection = unit.connection
        counted = connection.all(statements.COUNT_OF, ANSWERED_BYTES)[0][0] or 0
        excess = int(counted) - KEPT_BYTES
        removed: list[str] = []
        freed = 0
        for key, answered_at, length in connection.all(statements.OLDEST_ANSWERED, TRIM_AT_ONCE):
            if answered_at > unit.wall - KEPT_SECONDS and freed >= excess:
                break
            removed.append(key)
            freed += ROW_BYTES + (length or 0)
        if removed:
            connection.run(statements.DELETE_ANSWERED, removed)
            unit.pending.counts.add(ANSWERED_BYTES, -freed)


def _size(answer: bytes | None) -> int:
    return ROW_BYTES + len(answer or b"")
