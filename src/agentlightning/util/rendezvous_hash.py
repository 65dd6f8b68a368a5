"""Rendezvous hashing: calls that share an affinity go to the same server, and few move when a server comes or goes."""

from __future__ import annotations

import hashlib


def weight(affinity: str, url: str) -> bytes:
    """Of the servers that may be asked, the one with the largest is (Thaler and Ravishankar, 1998)."""
    return hashlib.blake2b(f"{affinity}\n{url}".encode(), digest_size=8).digest()
