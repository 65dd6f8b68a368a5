"""Token lists in binary, and prompts in blocks that are stored once.

A prompt is cut into blocks of BLOCK tokens. A block is named by a digest of its parent's digest and its own tokens, so
a digest names everything up to the end of its block, and equal beginnings have equal blocks: the turns of a
conversation, the rollouts of a group and the branches of an agent share them without knowing of one another. A span
keeps the digest of its last full block, and the rest of its prompt (less than a block) inline.

    BLOCK = 2       prompt [5, 6, 7, 8, 9]  ->  a = digest("" + 5 6), b = digest(a + 7 8);  the span keeps b, [9]
                    prompt [5, 6, 7, 8, 4, 3, 2]  ->  a, b, c = digest(b + 4 3);  only c is new;  keeps c, [2]

Numbers are int32 and float32, little endian. This module is pure: it neither reads nor writes a database.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, cast

from agentlightning.errors import ConfigError, StoreError

BLOCK: Final = 128
"""Tokens in a block. A span stores half a block inline on average, a smaller block costs more rows; of 64 to 512, this
one took the least space for conversations in a SQLite file, whose pages seven of its rows fill. Changing it is safe, as
every block keeps its own length, but new prompts then share nothing with old ones."""
DIGEST: Final = 16
"""Bytes of a digest."""
CACHE_BYTES: Final = 4 << 20
_BLOCK_BYTES: Final = 4 * BLOCK


# -- numbers ---------------------------------------------------------------------------------------------------------


def pack_ids(value: Any) -> bytes | None:
    """A list of token ids in binary; None where it is no list of int32."""
    if not isinstance(value, list | tuple):
        return None
    ids = cast("Sequence[Any]", value)
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error:
        return None


def pack_logprobs(name: str, value: Any) -> bytes | None:
    """A list of log-probabilities in binary, rounded to float32; None where it is no list of numbers. ConfigError,
    naming the place, where one is not finite."""
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
    if bad is None:  # each is finite, their sum is not
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
    """BLOCK tokens of a prompt, as they are stored."""

    digest: bytes
    """blake2b of `parent + ids`, DIGEST bytes."""
    parent: bytes
    """The digest of the block before it; empty for the first."""
    ids: bytes


@dataclass(frozen=True, slots=True)
class TokenChain:
    """The full blocks of one prompt."""

    digests: tuple[bytes, ...]
    """Of each block, the first one first. Never empty."""
    ids: bytes
    """The tokens of all of them."""

    @property
    def head(self) -> bytes:
        """The digest of the last block, which names the chain."""
        return self.digests[-1]


class ChainCache:
    """The last chain of each attempt, so that the next turn of a conversation hashes only what is new. Bounded, and
    safe to share between threads."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._chains: OrderedDict[str, TokenChain] = OrderedDict()
        self._lock = threading.Lock()

    def cut(self, attempt_id: str, prompt: bytes) -> tuple[TokenChain | None, bytes]:
        """(the full blocks of a prompt given in binary, or None where it has none; the rest)."""
        full = len(prompt) - len(prompt) % _BLOCK_BYTES
        if not full:
            return None, prompt
        with self._lock:
            known = self._chains.get(attempt_id)
        digests = _digests(prompt, full, known)
        chain = TokenChain(digests, prompt[:full])
        self._keep(attempt_id, chain)
        return chain, prompt[full:]

    def _keep(self, attempt_id: str, chain: TokenChain) -> None:
        with self._lock:
            old = self._chains.pop(attempt_id, None)
            self._bytes += len(chain.ids) - (0 if old is None else len(old.ids))
            self._chains[attempt_id] = chain
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._chains.popitem(last=False)[1].ids)


def _digests(prompt: bytes, full: int, known: TokenChain | None) -> tuple[bytes, ...]:
    digests = list(_shared(prompt, full, known)) if known is not None else []
    parent = digests[-1] if digests else b""
    for start in range(len(digests) * _BLOCK_BYTES, full, _BLOCK_BYTES):
        parent = blake2b(parent + prompt[start : start + _BLOCK_BYTES], digest_size=DIGEST).digest()
        digests.append(parent)
    return tuple(digests)


def _shared(prompt: bytes, full: int, known: TokenChain) -> tuple[bytes, ...]:
    """The digests of the blocks with which the prompt begins as the known one does."""
    if prompt.startswith(known.ids):
        return known.digests
    low, high = 0, min(len(known.digests), full // _BLOCK_BYTES)
    while low < high:
        middle = (low + high + 1) // 2
        if prompt.startswith(known.ids[: middle * _BLOCK_BYTES]):
            low = middle
        else:
            high = middle - 1
    return known.digests[:low]


def blocks_of(chains: Iterable[TokenChain], known: Container[bytes] = ()) -> list[TokenBlock]:
    """The blocks of some chains, each once, parents first. Where `known` has the digest of a block, that block and all
    before it are left out: who stored a block has stored its parents."""
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
    """The tokens that each head names, from rows of (digest, parent, ids) in any order. A head of which a block is
    missing is left out."""
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


def missing_tokens(span_id: str) -> StoreError:
    """What to raise where the blocks of a stored span are not all there."""
    return StoreError(f"tokens of span {span_id!r} are missing from the database: it was changed by another program")
