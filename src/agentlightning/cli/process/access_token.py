"""Hides the access token of a program from the agents that it runs, which run as the same user.

Every process of a user can read the environment (`/proc/PID/environ`) and the memory of the others. Called by
`agl runner` and `agl run` once they have read the token.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

VARIABLE: Final = "AGL_TOKEN"
_PR_SET_DUMPABLE: Final = 4
_ENV_START, _ENV_END = 49, 50
"""Indexes, from 0, of the fields of `/proc/PID/stat` with the bounds of the initial environment."""


def hide_token() -> None:
    """Remove the token from the environment, also where the kernel shows it, and make the memory of this process
    unreadable to other processes of the same user."""
    token = os.environ.pop(VARIABLE, None)
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if token:
        _erase(f"{VARIABLE}={token}")


def _erase(entry: str) -> None:
    """Overwrite an entry of the initial environment."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ENV_START - 2]), int(fields[_ENV_END - 2])
    except (OSError, ValueError, IndexError):
        return
    if not start < end:  # a kernel that hides addresses
        return
    whole, text = ctypes.string_at(start, end - start), os.fsencode(entry) + b"\0"
    at = 0 if whole.startswith(text) else whole.find(b"\0" + text) + 1
    if whole[at:].startswith(text):
        ctypes.memset(start + at, 0, len(text))
