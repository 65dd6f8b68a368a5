"""The log file that agents print to, limited in size.

Agent processes append to the file themselves, so that logging survives the runner. The runner checks its size
periodically: the end of a file over the limit is moved to `NAME.1`, and the file is truncated.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

LIMIT_BYTES: Final = 16 * 1024 * 1024
CHECK_SECONDS: Final = 1.0


class AgentLog:
    """One log file."""

    def __init__(self, path: str | Path, limit: int = LIMIT_BYTES) -> None:
        self.path = Path(path)
        self.limit = limit
        self.cut = 0
        """How many times it was truncated."""

    @property
    def previous(self) -> Path:
        """File with the end of the truncated output."""
        return self.path.with_name(f"{self.path.name}.1")

    async def trim_periodically(self) -> None:
        while True:
            await asyncio.to_thread(self.trim)
            await asyncio.sleep(CHECK_SECONDS)

    def trim(self) -> None:
        """Rotate the file if it exceeds the limit. Output written between copying and truncating is lost."""
        try:
            with self.path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                if size <= self.limit:
                    return
                file.seek(size - self.limit)
                self.previous.write_bytes(file.read(self.limit))
                file.truncate(0)
        except OSError:  # not a regular file, or deleted: nothing to limit
            return
        self.cut += 1
