"""Translates errors of the SQLite driver into StoreErrors that name the file and the way out."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

from agentlightning.errors import StoreError, StoreFullError

SCARCE_BYTES = 1 << 20
"""With less free space than this, a failed write is attributed to a full disk."""

_FATAL = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_READONLY,
    }
)


def is_fatal(error: BaseException) -> bool:
    """Whether the database may have rolled back the whole transaction, not only the statement."""
    return isinstance(error, sqlite3.Error) and _code(error) in _FATAL


def _code(error: sqlite3.Error) -> int:
    """The primary result code: the low byte of the extended one."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def explain(error: sqlite3.Error, path: Path | None) -> StoreError:
    """The error to raise instead of `error`."""
    where = str(path) if path is not None else "the in-memory store"
    code = _code(error)
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _free_bytes(path) < SCARCE_BYTES):
        return StoreFullError(
            f"the disk is full: {where} could not be written ({_free_bytes(path) / 1e6:.1f} MB free); nothing of this "
            "call was stored; free some space and call again"
        )
    return StoreError(f"{where}: {error}; {_advice(code, where)}")


def _advice(code: int, where: str) -> str:
    if code == sqlite3.SQLITE_NOTADB:
        return "this file is not a store; give another path, or move it away to start an empty store"
    if code == sqlite3.SQLITE_CORRUPT:
        return f"the file is damaged; move it away, or save what can be read with: sqlite3 {where} .recover"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another process has held the write lock for too long; end it, or give each run its own store"
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return "check that the directory exists and that this user may write there"
    if code == sqlite3.SQLITE_IOERR:
        return "the disk refused; check it, and keep the store on a local file system"
    return "this is not expected; the statement was undone"


def _free_bytes(path: Path | None) -> float:
    if path is None:
        return 0.0
    folder = next((parent for parent in path.parents if parent.exists()), Path("/"))
    return float(shutil.disk_usage(folder).free)
