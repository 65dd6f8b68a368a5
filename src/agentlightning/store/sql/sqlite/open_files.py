"""Detects that the files of a database were deleted or replaced while it was open.

Such a file lives on for the processes that have it open: SQLite goes on writing to it, and what it writes is lost.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from agentlightning.errors import StoreLostError

_SUFFIXES: Final = ("", "-wal", "-shm")


class OpenFiles:
    """The files of a database that was just opened. Used within its transactions, while all of them exist."""

    def __init__(self, path: Path) -> None:
        self._name = str(path)
        place = os.path.realpath(path)
        self._paths = [place + suffix for suffix in _SUFFIXES]
        self._known: list[tuple[int, int] | None] = [_identity(place), None, None]

    def check(self) -> None:
        """Raises StoreLostError."""
        for index, path in enumerate(self._paths):
            found, known = _identity(path), self._known[index]
            if known is None:
                self._known[index] = known = found
            if found is None or found != known:
                raise StoreLostError(
                    f"{path} was {'deleted' if found is None else 'replaced'} while {self._name} was open: nothing of "
                    "this call was stored, and nothing more will be; what was stored before can be read until this "
                    "process ends: export it (agl store export FILE --server URL), then open the store again"
                )


def _identity(path: str) -> tuple[int, int] | None:
    """(device, inode); None if there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
