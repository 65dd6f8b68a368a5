"""Content-addressed blocks of prompt tokens, so that common prefixes are stored once; token lists in binary.

A prompt is split into blocks of BLOCK tokens. The digest of a block covers its parent's digest and its own tokens, so a
digest identifies everything up to the end of its block, and equal prefixes have equal blocks: the turns of a
conversation, the rollouts of a group and the branches of an agent share them without any coordination. A span stores
the digest of its last full block, and the rest of its prompt (less than a block) inline.

    BLOCK = 2       prompt [5, 6, 7, 8, 9]  ->  a = digest("" + 5 6), b = digest(a + 7 8);  the span stores b, [9]
                    prompt [5, 6, 7, 8, 4, 3, 2]  ->  a, b, c = digest(b + 4 3);  only c is new;  stores c, [2]

Numbers are int32 and float32, little endian. This module is pure: it neither reads nor writes a database.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, cast

from agentlightning.errors import ConfigError

BLOCK: Final = 128
"""Tokens in a block. A span stores half a block inline on average, and a smaller block costs more rows: of the sizes 64
to 512, this one took the least space for conversations in a SQLite file (seven rows fill a page). It may be changed, as
every block has a length of its own, but new prompts then share nothing with old ones."""
DIGEST: Final = 16
"""Bytes of a digest."""
_BLOCK_BYTES: Final = 4 * BLOCK
_AT_ONCE: Final = 65536
"""Token ids that are packed at once: meanwhile no other thread runs."""


# -- numbers ---------------------------------------------------------------------------------------------------------


def pack_ids(value: Any) -> bytes | None:
    """Token ids in binary; None for what is no list of int32."""
    if not isinstance(value, list | tuple):
        return None
    ids = cast("Sequence[Any]", value)
    parts = [ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE)]
    try:
        return b"".join([struct.pack(f"<{len(part)}i", *part) for part in parts])
    except struct.error:
        return None


def pack_logprobs(name: str, value: Any) -> bytes | None:
    """Log-probabilities in binary, rounded to float32; None for what is no list of numbers. Raises ConfigError, which
    names the index, if one is not finite."""
    if not isinstance(value, list | tuple):
        return None
    numbers = cast("Sequence[Any]", value)
    try:
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
        if math.isfinite(sum(numbers)):
            return packed
    except struct.error:
        return None
    except OverflowError:  # too large for float32, or for any float
        pass
    bad = next((index for index, number in enumerate(numbers) if not _fits(number)), None)
    if bad is None:  # only their sum is not finite
        return struct.pack(f"<{len(numbers)}f", *numbers)
    raise ConfigError(f"{name}[{bad}] is {numbers[bad]}; a log-probability is a finite number within float32")


def _fits(number: Any) -> bool:
    try:
        return math.isfinite(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return False


def read_ids(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def read_logprobs(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


# -- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """BLOCK tokens of a prompt: one row of the database."""

    digest: bytes
    """blake2b of `parent + ids`, DIGEST bytes."""
    parent: bytes
    """The digest of the previous block; empty for the first one."""
    ids: bytes


@dataclass(frozen=True, slots=True)
class TokenChain:
    """The full blocks of one prompt."""

    digests: tuple[bytes, ...]
    """Of the blocks, in order. Never empty."""
    ids: bytes
    """The tokens of all blocks."""

    @property
    def head(self) -> bytes:
        """The digest of the last block, which identifies the chain."""
        return self.digests[-1]


def split(prompt: bytes) -> tuple[TokenChain | None, bytes]:
    """(the full blocks of a binary prompt, or None if it is shorter than a block; the rest)."""
    full = len(prompt) - len(prompt) % _BLOCK_BYTES
    digests: list[bytes] = []
    parent = b""
    for start in range(0, full, _BLOCK_BYTES):
        parent = blake2b(parent + prompt[start : start + _BLOCK_BYTES], digest_size=DIGEST).digest()
        digests.append(parent)
    return TokenChain(tuple(digests), prompt[:full]) if digests else None, prompt[full:]


def blocks_of(chains: Iterable[TokenChain], known: Container[bytes] = ()) -> list[TokenBlock]:
    """The blocks of some chains, each once, parents first. A block whose digest is in `known` is left out, with all
    before it: whoever stored a block has stored its parents."""
    found: dict[bytes, TokenBlock] = {}
    for chain in chains:
        digests = chain.digests
        first = len(digests)
        while first and digests[first - 1] not in known and digests[first - 1] not in found:
            first -= 1
        for index in range(first, len(digests)):
            start = index * _BLOCK_BYTES
            parent = digests[index - 1] if index else b""
            found[digests[index]] = TokenBlock(digests[index], parent, chain.ids[start : start + _BLOCK_BYTES])
    return list(found.values())


def join_blocks(heads: Iterable[bytes], blocks: Iterable[tuple[bytes, bytes, bytes]]) -> dict[bytes, bytes]:
    """The tokens of each chain, by the digest of its last block, from rows of (digest, parent, ids) in any order. A
    chain of which a block is missing is left out."""
    rows = {digest: (parent, ids) for digest, parent, ids in blocks}
    joined: dict[bytes, bytes] = {}
    for head in heads:
        parts: list[bytes] = []
        digest = head
        while digest and digest not in joined and digest in rows:
            digest, ids = rows[digest]
            parts.append(ids)
        if not digest or digest in joined:
            parts.append(joined.get(digest, b""))
            joined[head] = b"".join(reversed(parts))
    return joined


def missing_tokens(span_id: str) -> ValueError:
    """The error for a span some of whose blocks are missing."""
    return ValueError(f"tokens of span {span_id!r} are missing from the database: it was changed by another program")
