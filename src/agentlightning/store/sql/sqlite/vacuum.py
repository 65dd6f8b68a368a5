"""Giving the free pages of a database file back to the system while others write to it.

A database that was made with `auto_vacuum = INCREMENTAL` is cut at its end, some pages at a time: what is there moves
into free pages further up. Each step holds the write lock for milliseconds, and between steps it is free for at least
as long. A database of before schema version 4 was made without; it is rewritten whole, once, during which nobody can
write.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from typing import Final

logger = logging.getLogger(__name__)

PAGES_AT_ONCE: Final = 256
"""1 MiB."""
STEPS_IN_LOG: Final = 32
"""The write-ahead log is moved into the database after so many steps, so that it stays small."""
SHORTEST_PAUSE_SECONDS: Final = 0.002
_INCREMENTAL: Final = 2


def shrink(cursor: sqlite3.Cursor) -> None:
    """Over a connection of its own that is in no transaction."""
    if _number(cursor, "auto_vacuum") != _INCREMENTAL:
        _rewrite(cursor)
        return
    steps = 0
    left = _number(cursor, "freelist_count")
    while left > 0:
        started = time.perf_counter()
        # Not `execute`: it takes one step of a statement without columns, and each step of this one frees a page.
        cursor.executescript(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")
        steps += 1
        if steps % STEPS_IN_LOG == 0:
            _move_log(cursor)
        time.sleep(max(SHORTEST_PAUSE_SECONDS, time.perf_counter() - started))
        before, left = left, _number(cursor, "freelist_count")
        if left >= before:  # others free pages as fast as they are given back
            break
    _move_log(cursor)


def _rewrite(cursor: sqlite3.Cursor) -> None:
    size = _number(cursor, "page_count") * _number(cursor, "page_size")
    logger.warning(
        "a database of an older version is rewritten whole (%d MB), once; writes wait until then", size // 10**6
    )
    cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
    cursor.execute("VACUUM")
    cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _move_log(cursor: sqlite3.Cursor) -> None:
    """Waits for nobody."""
    cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _number(cursor: sqlite3.Cursor, name: str) -> int:
    return int(cursor.execute(f"PRAGMA {name}").fetchone()[0])
