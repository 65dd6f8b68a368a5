"""Returns the free pages of a database file to the file system while others write to it.

A database created with `auto_vacuum = INCREMENTAL` is truncated some pages at a time: pages at its end move into free
pages further up. Each step holds the write lock for milliseconds, and between steps the lock is free for at least as
long.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Final

STEP_PAGES: Final = 256
"""1 MiB."""
CHECKPOINT_STEPS: Final = 32
"""The write-ahead log is checkpointed after this many steps, so that it stays small."""
MIN_PAUSE_SECONDS: Final = 0.002


def shrink(cursor: sqlite3.Cursor) -> None:
    """`cursor` is of a connection that nobody else uses, in no transaction."""
    steps = 0
    left = _number(cursor, "freelist_count")
    while left > 0:
        started = time.perf_counter()
        # Not `execute`, which takes a single step of a statement without columns: each step frees one page.
        cursor.executescript(f"PRAGMA incremental_vacuum({STEP_PAGES})")
        steps += 1
        if steps % CHECKPOINT_STEPS == 0:
            _checkpoint(cursor)
        time.sleep(max(MIN_PAUSE_SECONDS, time.perf_counter() - started))
        before, left = left, _number(cursor, "freelist_count")
        if left >= before:  # others free pages as fast as these are returned
            break
    _checkpoint(cursor)


def _checkpoint(cursor: sqlite3.Cursor) -> None:
    """Without waiting for others."""
    cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _number(cursor: sqlite3.Cursor, name: str) -> int:
    return int(cursor.execute(f"PRAGMA {name}").fetchone()[0])
