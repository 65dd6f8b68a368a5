"""Locks an open file until the process ends: flock, or its equivalent on Windows."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    import msvcrt

    _OFFSET = 1 << 30
    """Beyond the content of the file: no other process can read a byte that is locked."""

    def lock_file(descriptor: int, *, shared: bool = False) -> bool:
        """Lock the file; False if another process has locked it. `shared` has no effect on Windows."""
        os.lseek(descriptor, _OFFSET, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def lock_file(descriptor: int, *, shared: bool = False) -> bool:
        """Lock the file; False if another process has locked it. Several processes may hold a `shared` lock."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
