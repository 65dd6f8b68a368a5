"""Two recorded trainings of the job of `agl demo --model smollm2-135m`, for `agl dashboard --demo`.

`recorded.tar.xz` has of each run what the pages show: files, and an export of the store for each version of its
resources. Times are seconds before the end of the run. `python -m tools.record_demo`, in a checkout, writes it.
"""

from __future__ import annotations

import re
import tarfile
import time
from pathlib import Path
from typing import Final

from agentlightning.store.clock import Clock
from agentlightning.store.export.copy import import_store
from agentlightning.store.sql.store import SqlStore

RECORDED: Final = Path(__file__).with_name("recorded.tar.xz")
EXPORTS: Final = "exports"
TIME: Final = re.compile(rb'(time":)(-?[\d.]+)')


class ThenClock(Clock):
    """Says what time it was."""

    def __init__(self, then: float) -> None:
        super().__init__()
        self._then = then

    def wall(self) -> float:
        return self._then


async def write_demo(root: Path) -> None:
    """Write the directories of both runs below another one, as if they had just ended."""
    for export in _unpack(root):
        first = TIME.search(export.read_bytes())
        assert first is not None
        store = SqlStore(export.parents[1] / "store.db", ThenClock(float(first[2])))
        try:
            await import_store(store, export)
        finally:
            await store.close()


def _unpack(root: Path) -> list[Path]:
    """Write all files; returns the exports, in order."""
    now = time.time()
    with tarfile.open(RECORDED) as recorded:
        for member in recorded:
            path, content = root / member.name, recorded.extractfile(member)
            assert content is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(TIME.sub(lambda found: b"%b%.3f" % (found[1], now + float(found[2])), content.read()))
    return sorted(root.glob(f"*/{EXPORTS}/*.jsonl"))
