"""Idempotency keys in the database: the result of each keyed call, written in the transaction of the call.

Rows are kept for RETENTION_SECONDS and up to MAX_BYTES. Every TRIM_INTERVAL new rows, the oldest ones are removed; the
size of the table is one of the counters, so that it need not be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from agentlightning.errors import ConflictError
from agentlightning.store.idempotency import AlreadyAnsweredError, IdempotentCall
from agentlightning.store.sql.tx import Tx, insert

RETENTION_SECONDS: Final = 86_400.0
MAX_BYTES: Final = 64 << 20
ROW_BYTES: Final = 200
"""Estimated size of a row and its two index entries, without the answer."""
TRIM_INTERVAL: Final = 64
TRIM_BATCH: Final = 256
_BYTES: Final = "answered bytes"
"""The counter of the estimated size of the table."""
_INSERT: Final = insert("answered_calls", ("key", "digest", "answered_at", "answer"))
_OLDEST: Final = (
    "SELECT key, answered_at, length(answer) FROM answered_calls ORDER BY answered_at LIMIT ? FOR UPDATE SKIP LOCKED"
)
"""Without those that another server is removing."""


class AnsweredCalls:
    """The keyed calls of one transaction after the other."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, bytes | None]] = {}
        self._since_trim = 0

    def load(self, tx: Tx, keys: list[str]) -> None:
        """Begin a transaction with these keys."""
        rows = tx.all("SELECT key, digest, answer FROM answered_calls WHERE key = ANY (?)", keys) if keys else ()
        self._known = {key: (digest, answer) for key, digest, answer in rows}

    def run(self, tx: Tx, call: IdempotentCall, work: Callable[[], Any], convert: Callable[[Any], Any] | None) -> Any:
        """Run `work` unless the key is known. Raises AlreadyAnsweredError for a repeated call, ConflictError for a key
        that was used with other arguments. A call that raises leaves no row: it did nothing."""
        if call.key not in self._known:
            result = work()
            answer = call.encoded(result if convert is None else convert(result))
            self._known[call.key] = (call.digest, answer)
            tx.insert(_INSERT, [(call.key, call.digest, tx.wall, answer)])
            tx.count(_BYTES, ROW_BYTES + len(answer or b""))
            self._since_trim += 1
            return result
        digest, answer = self._known[call.key]
        if digest != call.digest:
            raise ConflictError(
                "this idempotency key was used for a call with other arguments; use a new key for each call, and the "
                "same one only to repeat it"
            )
        raise AlreadyAnsweredError(answer)

    def trim(self, tx: Tx) -> None:
        """When all commands of a transaction have run."""
        if self._since_trim >= TRIM_INTERVAL:
            self._since_trim = 0
            tx.count(_BYTES, -_trim(tx))


def _trim(tx: Tx) -> int:
    """Remove rows that are too old or too many; returns their bytes."""
    total = tx.all("SELECT CAST(sum(number) AS BIGINT) FROM counts WHERE name = ?", _BYTES)
    excess = int(total[0][0] or 0) - MAX_BYTES
    removed: list[str] = []
    freed = 0
    for key, answered_at, length in tx.all(_OLDEST, TRIM_BATCH):
        if answered_at > tx.wall - RETENTION_SECONDS and freed >= excess:
            break
        removed.append(key)
        freed += ROW_BYTES + (length or 0)
    if removed:
        tx.run("DELETE FROM answered_calls WHERE key = ANY (?)", removed)
    return freed
