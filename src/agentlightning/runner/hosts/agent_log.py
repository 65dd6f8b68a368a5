"""What agents print, in a file of bounded size.

The processes of the agents write to the file themselves, so that it goes on whatever becomes of the runner. The runner
looks at its size now and then: a file that has grown beyond the limit keeps its end beside it, as `NAME.1`, and is
emptied.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LIMIT_BYTES: Final = 16 * 1024 * 1024
LOOK_SECONDS: Final = 1.0


class AgentLog:
    """One log file."""

    def __init__(self, path: str | Path, limit: int = LIMIT_BYTES) -> None:
        self.path = Path(path)
        self.limit = limit
        self.cut = 0
        """How many times it was cut."""

    @property
    def previous(self) -> Path:
        """Where the end of what was cut is."""
        return self.path.with_name(f"{self.path.name}.1")

    def trim(self) -> None:
        """Cut the file if it is too long. What is printed in the moment between reading and emptying it is lost."""
        try:
            with self.path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                if size <= self.limit:
                    return
                file.seek(size - self.limit)
                self.previous.write_bytes(file.read(self.limit))
                file.truncate(0)
        except OSError:  # no regular file, or it is gone: then nothing grows
            return
        self.cut += 1
