"""A lock on an open file that ends with its process: flock, or its like on Windows."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    import msvcrt

    _PLACE = 1 << 30
    """Beyond what is in the file: a byte that is locked there can be read by nobody else."""

    def lock_file(descriptor: int, *, shared: bool = False) -> bool:
        """Lock it where nobody else has; False where somebody has. `shared`: others may lock it so too (not here)."""
        os.lseek(descriptor, _PLACE, os.SEEK_SET)
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
        """Lock it where nobody else has; False where somebody has. `shared`: others may lock it so too."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
