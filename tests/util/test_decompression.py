"""A compressed body is decompressed up to its limit, a large one without blocking the event loop."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.util.decompression import INLINE_BYTES, CodingError, decompress

pytestmark = pytest.mark.integration

PLAIN = b"some text, " * 1000


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("pyarrow").Codec("zstd").compress(data).to_pybytes()


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("Deflate ", zlib.compress), ("zstd", zstd)])
async def test_every_coding_is_read_to_its_end_and_not_beyond_the_limit(coding: str, pack: Callable[..., Any]) -> None:
    large = PLAIN * 1000
    assert await decompress(pack(PLAIN), coding, len(PLAIN)) == PLAIN
    assert await decompress(pack(large), coding, len(large)) == large
    for body in (PLAIN, large):
        with pytest.raises(CodingError, match=f"more than {len(body) - 1} bytes") as refused:
            await decompress(pack(body), coding, len(body) - 1)
        assert refused.value.status == 413
    with pytest.raises(CodingError) as cut:
        await decompress(pack(PLAIN)[:-10], coding, len(PLAIN))
    assert cut.value.status == 400
    with pytest.raises(CodingError) as other:
        await decompress(b"nothing of the kind" * 10, coding, len(PLAIN))
    assert other.value.status == 400


async def test_the_loop_goes_on_while_large_bodies_are_decompressed() -> None:
    bomb = gzip.compress(bytes(INLINE_BYTES * 100))
    work = asyncio.gather(*(decompress(bomb, "gzip", INLINE_BYTES * 100) for _ in range(4)))
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert [len(each) for each in await work] == [INLINE_BYTES * 100] * 4
    assert turns > 4


async def test_a_coding_nobody_knows_is_named_with_those_that_are_known() -> None:
    with pytest.raises(CodingError, match=r"'br' is not supported; send gzip, deflate") as refused:
        await decompress(b"x", "br", 10)
    assert refused.value.status == 415
    assert await decompress(b"x", "identity", 10) == b"x"
