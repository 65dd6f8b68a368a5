"""Ids of rollouts, attempts, resources and claims. Unique, not secret: an attempt proves itself with a signed key."""

from __future__ import annotations

import hashlib
import re
import time

from agentlightning.util.random_ids import random_bits

_new_id = re.compile(r"[a-z]+-([0-9a-f]{12})[0-9a-f]{12}")


def new_hex() -> str:
    """16 random hexadecimal digits."""
    return f"{random_bits(64):016x}"


def new_id(kind: str) -> str:
    """Such as `ro-019de2b4c1a3f00c55d0e6b1`: 12 hexadecimal digits of milliseconds, 12 at random. New ids sort last,
    so that an index grows at its end however large it is."""
    return f"{kind}-{time.time_ns() // 1_000_000:012x}{random_bits(48):012x}"


def first_of_claim(claim_id: str | None) -> str | None:
    """The id of the first attempt that a claim starts; None without a claim_id."""
    return None if claim_id is None else claimed_id(claim_id, 0)


def claimed_id(claim_id: str, index: int) -> str:
    """The id of the attempt that a claim starts at `index`: the same each time the claim is repeated. Its time is that
    of the claim_id, where `new_id` made that."""
    digest = hashlib.blake2b(f"{claim_id}/{index}".encode(), digest_size=12).hexdigest()
    timed = _new_id.fullmatch(claim_id)
    return f"at-{timed[1]}{digest[:12]}" if timed else f"at-{digest}"
