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


async def trim_periodically(path: Path) -> None:
    while True:
        await asyncio.to_thread(trim, path)
        await asyncio.sleep(CHECK_SECONDS)


def trim(path: Path, limit: int = LIMIT_BYTES) -> None:
    """Rotate a file that exceeds the limit. Output written between copying and truncating is lost."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size > limit:
                file.seek(size - limit)
                path.with_name(f"{path.name}.1").write_bytes(file.read(limit))
                file.truncate(0)
    except OSError:  # not a regular file, or deleted: nothing to limit
        return
