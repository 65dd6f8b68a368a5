"""Checkpoints SQLite's write-ahead log in a thread beside the writer's.

A checkpoint writes every page a second time. SQLite would do so within a commit, which delays every caller. Here a
thread does most of it while commits go on, and the writer then checkpoints the few pages added meanwhile, so that the
log restarts from its beginning: overwriting a log costs far less to sync than growing it.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

LOG_BYTES: Final = 4 << 20
"""Estimated size of the log at which it is checkpointed."""
COMMIT_BYTES: Final = 12 * 4096
"""Estimated bytes that a commit writes besides large values."""


class Checkpointer:
    """`connect` opens the connection of the thread. Used by the writer, except for `_work`."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._bytes = 0
        self._requested = threading.Event()
        self._done = False
        self._ended = False
        self._thread: threading.Thread | None = None

    def committed(self, cursor: sqlite3.Cursor, large_values: int) -> None:
        """To be called after each commit; large_values: their bytes in it."""
        self._bytes += COMMIT_BYTES + large_values
        if self._done:
            self._done = False
            self._bytes = 0
            self._checkpoint(cursor)
        elif self._bytes > LOG_BYTES and not self._requested.is_set():
            self._request()

    def _request(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="agl-store-checkpoints", daemon=True)
            self._thread.start()
        self._requested.set()

    def _work(self) -> None:
        connection = self._connect()
        cursor = connection.cursor()
        while not self._ended:
            self._requested.wait()
            if not self._ended:
                self._checkpoint(cursor)
                self._done = True
            self._requested.clear()  # a request after this sets it again; one before it was served
        connection.close()

    def _checkpoint(self, cursor: sqlite3.Cursor) -> None:
        try:
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:  # nothing is lost: the next checkpoint writes these pages
            logger.warning("the write-ahead log could not be checkpointed: %s", error)

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._requested.set()
        if self._thread is not None:
            self._thread.join()
