"""Locks an open file until the process ends."""

from __future__ import annotations

import fcntl


def lock_file(descriptor: int, *, shared: bool = False) -> bool:
    """Lock the file; False if another process has locked it. Several processes may hold a `shared` lock."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
