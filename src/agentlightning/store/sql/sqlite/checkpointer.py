"""Moving SQLite's write-ahead log into the database in a thread beside the writer's.

A checkpoint writes everything a second time. SQLite would do it within a commit, holding up every caller; here a thread
does most of it while commits go on, and the writer then moves the few pages that came meanwhile, so that the log starts
again from its beginning: one that is written over costs far less to sync than one that grows.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

LOG_BYTES: Final = 4 << 20
"""What the log may hold before it is moved, about."""
COMMIT_BYTES: Final = 12 * 4096
"""What a commit writes besides the bodies of packs, about."""


class Checkpointer:
    """`connect` opens a connection of the thread's own. Used by the writer, but for `_work`."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._bytes = 0
        self._wanted = threading.Event()
        self._done = False
        self._ended = False
        self._thread: threading.Thread | None = None

    def committed(self, cursor: sqlite3.Cursor, written: int) -> None:
        """After each commit; `written` are the bytes of large values in it."""
        self._bytes += COMMIT_BYTES + written
        if self._done:
            self._done = False
            self._bytes = 0
            self._move(cursor)
        elif self._bytes > LOG_BYTES and not self._wanted.is_set():
            self._ask()

    def _ask(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="agl-store-checkpoints", daemon=True)
            self._thread.start()
        self._wanted.set()

    def _work(self) -> None:
        connection = self._connect()
        cursor = connection.cursor()
        while not self._ended:
            self._wanted.wait()
            if not self._ended:
                self._move(cursor)
                self._done = True
            self._wanted.clear()  # what comes after this sets it again, what came before is seen by the loop
        connection.close()

    def _move(self, cursor: sqlite3.Cursor) -> None:
        try:
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:  # the log stays as it is: nothing is lost, and the next one moves it
            logger.warning("the write-ahead log could not be moved into the database: %s", error)

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
