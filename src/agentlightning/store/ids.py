"""Fresh ids. Unique, not secret: whoever speaks for an attempt proves it with a signed key.

One generator for the process, seeded by the operating system: asking it for each id costs a system call, which gives
up the interpreter lock each time.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import time

_made = re.compile(r"[a-z]+-([0-9a-f]{12})[0-9a-f]{12}")
_random = random.Random()  # not the module's own: a user's random.seed must not repeat ids
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_random.seed)


def new_hex() -> str:
    """16 hexadecimal digits."""
    return f"{_random.getrandbits(64):016x}"


def new_random(count: int) -> bytes:
    """So many bytes."""
    return _random.randbytes(count)


def new_id(kind: str) -> str:
    """Such as `ro-019de2b4c1a3f00c55d0e6b1`: 12 hexadecimal digits of milliseconds, 12 at random. New ids sort last,
    so that an index grows at its end however large it is."""
    return f"{kind}-{time.time_ns() // 1_000_000:012x}{_random.getrandbits(48):012x}"


def claimed_id(claim_id: str, index: int) -> str:
    """The id of the attempt that a claim starts at `index`: the same each time the claim is repeated. One made by
    `new_id` hands on its time."""
    digest = hashlib.blake2b(f"{claim_id}/{index}".encode(), digest_size=12).hexdigest()
    made = _made.fullmatch(claim_id)
    return f"at-{made[1]}{digest[:12]}" if made else f"at-{digest}"
