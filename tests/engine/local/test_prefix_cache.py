"""The radix prefix cache: longest match, bounded memory, eviction order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.engine.local.kv_cache import RadixPrefixCache, Segment
from agentlightning.util.common_prefix import common_prefix_length

pytestmark = pytest.mark.integration

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def segment(tokens: list[int], start: int, stop: int) -> Segment:
    """Keys and values that identify their tokens and everything before them."""
    marks = [hash(tuple(tokens[: i + 1])) % 2**31 for i in range(start, stop)]
    return [torch.tensor(marks, dtype=torch.int64).view(1, 1, -1, 1).clone()]


def cached(cache: RadixPrefixCache, tokens: list[int]) -> list[int]:
    """Cached values for `tokens`, one per token."""
    match = cache.match(tokens)
    found = [part[0, 0, :, 0].tolist()[:count] for node, count in match.nodes for part in node.segment]
    marks = [mark for part in found for mark in part]
    assert len(marks) == match.length
    return marks


@settings(max_examples=100)
@given(sequences=sequences, queries=sequences)
def test_match_finds_the_longest_inserted_prefix(sequences: list[list[int]], queries: list[list[int]]) -> None:
    cache = RadixPrefixCache(1 << 20)
    for tokens in sequences:
        cache.insert(tokens, lambda start, stop, tokens=tokens: segment(tokens, start, stop))
    for tokens in queries + sequences:
        longest = max(common_prefix_length(tokens, other) for other in sequences)
        assert cached(cache, tokens) == segment(tokens, 0, longest)[0].flatten().tolist()
    unique = {tuple(tokens[: i + 1]) for tokens in sequences for i in range(len(tokens))}
    assert cache.num_bytes == 8 * len(unique)
    cache.clear()
    assert (cache.num_bytes, len(cache), cache.match(sequences[0]).length) == (0, 0, 0)


@settings(max_examples=100)
@given(sequences=sequences, limit=st.integers(0, 20))
def test_a_full_cache_evicts_the_oldest_and_stays_consistent(sequences: list[list[int]], limit: int) -> None:
    cache = RadixPrefixCache(8 * limit)
    for tokens in sequences:
        cache.insert(tokens, lambda start, stop, tokens=tokens: segment(tokens, start, stop))
        assert cache.num_bytes == sum(node.num_bytes for node in cache._order) <= 8 * limit
        for other in sequences:
            marks = cached(cache, other)
            assert marks == segment(other, 0, len(marks))[0].flatten().tolist()


def test_eviction_is_least_recently_used() -> None:
    cache = RadixPrefixCache(8 * 6)
    for tokens in ([1, 1, 1], [2, 2, 2]):
        cache.insert(tokens, lambda start, stop, tokens=tokens: segment(tokens, start, stop))
    assert cache.match([1, 1, 1]).length == 3
    cache.insert([3, 3], lambda start, stop: segment([3, 3], start, stop))
    assert [cache.match(tokens).length for tokens in ([1, 1, 1], [2, 2, 2], [3, 3])] == [3, 0, 2]


def test_what_nothing_else_shares_of_a_long_sequence_makes_room_for_what_follows_its_beginning() -> None:
    cache, prompt = RadixPrefixCache(8 * 12), [7, 7, 7, 7]
    for tokens in ([*prompt, *range(10, 18)], [*prompt, 1, 1], [*prompt, 1, 1, 2, 2]):
        cache.insert(tokens, lambda start, stop, tokens=tokens: segment(tokens, start, stop))
    assert cache.match([*prompt, 1, 1, 2, 2, 3]).length == 8
    assert cache.match([*prompt, *range(10, 18)]).length == 4
