"""Fresh ids. Unique, not secret: whoever speaks for an attempt proves it with a signed key.

One generator for the process, seeded by the operating system: asking it for each id costs a system call, which gives
up the interpreter lock each time.
"""

from __future__ import annotations

import os
import random

_random = random.Random()  # not the module's own: a user's random.seed must not repeat ids
os.register_at_fork(after_in_child=_random.seed)


def new_hex() -> str:
    """16 hexadecimal digits."""
    return f"{_random.getrandbits(64):016x}"


def new_id(kind: str) -> str:
    """Such as `ro-0123456789abcdef`."""
    return f"{kind}-{new_hex()}"
