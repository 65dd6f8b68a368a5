"""Rendezvous hashing: assigns keys to servers so that few keys move when a server is added or removed."""

from __future__ import annotations

import hashlib


def weight(affinity: str, url: str) -> bytes:
    """The weight of a server for a key; the server with the largest weight is chosen (Thaler and Ravishankar, 1998)."""
    return hashlib.blake2b(f"{affinity}\n{url}".encode(), digest_size=8).digest()
