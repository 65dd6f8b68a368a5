"""The ranks that a trainer has started on its machine."""

from __future__ import annotations

from contextlib import suppress

import psutil


def ranks_of(pid: int) -> list[psutil.Process]:
    """Those of the trainer with this process, by rank, without rank 0, which is the trainer."""
    found: list[psutil.Process] = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # It has ended meanwhile.
            found += [child] * ("agentlightning.policy.fsdp" in child.cmdline())
    return found
