"""Prompts are stored once, however many spans, attempts and branches begin with the same tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.span import PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, Span
from agentlightning.store.sql.spans import token_blocks
from agentlightning.store.sql.spans.codec import SpanPack, pack
from agentlightning.store.sql.spans.token_blocks import BLOCK, TokenChain, blocks_of, join_blocks, split


def call(prompt: list[int], response: list[int], attempt_id: str = "at-1") -> SpanPack:
    attributes = {PROMPT_TOKEN_IDS: prompt, RESPONSE_TOKEN_IDS: response}
    return pack([Span("ro-1", attempt_id, "chat", 1.0, attributes=attributes)])


def stored(packs: list[SpanPack]) -> int:
    """Bytes of tokens that a store keeps for some packs: each block once."""
    blocks = {block.digest: len(block.ids) for each in packs for block in each.blocks()}
    return sum(blocks.values()) + sum(len(each.numbers) for each in packs)


def conversation(turns: int, new: int, seed: int = 0, attempt_id: str = "at-1") -> list[SpanPack]:
    """Each turn's prompt is all that was said before, and `new` tokens of it are new."""
    source = random.Random(seed)
    said: list[int] = []
    packs: list[SpanPack] = []
    for _ in range(turns):
        said = said + [source.randrange(100_000) for _ in range(new // 2)]
        answer = [source.randrange(100_000) for _ in range(new // 2)]
        packs.append(call(said, answer, attempt_id))
        said = said + answer
    return packs


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(2, 700))
def test_a_conversation_takes_space_for_what_is_new_in_each_turn(turns: int, new: int) -> None:
    unique = 4 * turns * new
    assert stored(conversation(turns, new)) <= 1.5 * unique + turns * 4 * BLOCK


def test_twice_the_turns_take_twice_the_space() -> None:
    assert stored(conversation(200, 300)) < 2.1 * stored(conversation(100, 300))


def test_a_group_stores_its_prompt_once() -> None:
    prompt = list(range(20 * BLOCK + 10))
    one = stored([call(prompt, [1, 2, 3])])
    group = stored([call(prompt, [1, 2, member], f"at-{member}") for member in range(16)])
    assert group == one + 15 * 4 * (10 + 3)


def test_branches_store_what_they_have_in_common_once() -> None:
    trunk = list(range(10 * BLOCK))
    branches = [call(trunk + [branch] * (2 * BLOCK), []) for branch in range(5)]
    assert stored(branches) == 4 * (10 * BLOCK + 5 * 2 * BLOCK)


def test_a_short_prompt_is_kept_with_its_span() -> None:
    short = call(list(range(BLOCK - 1)), [])
    assert short.blocks() == []
    assert len(short.numbers) == 4 * (BLOCK - 1)


# -- chains ----------------------------------------------------------------------------------------------------------


def cut(prompt: list[int]) -> tuple[TokenChain | None, bytes]:
    data = token_blocks.pack_ids(prompt)
    assert data is not None
    return split(data)


def rows(chains: list[TokenChain], known: Any = ()) -> list[tuple[bytes, bytes, bytes]]:
    return [(block.digest, block.parent, block.ids) for block in blocks_of(chains, known)]


prompts = st.lists(
    st.tuples(st.integers(0, 4 * BLOCK), st.integers(0, 4 * BLOCK), st.integers(0, 2)).map(
        lambda shape: list(range(shape[0])) + [shape[2]] * shape[1]
    ),
    min_size=1,
    max_size=6,
)


@given(prompts)
def test_a_prompt_is_put_together_from_its_blocks(several: list[list[int]]) -> None:
    parts = [cut(prompt) for prompt in several]
    chains = [chain for chain, _ in parts if chain is not None]
    joined = join_blocks([chain.head for chain in chains], reversed(rows(chains)))
    for prompt, (chain, rest) in zip(several, parts, strict=True):
        assert token_blocks.read_ids((joined[chain.head] if chain else b"") + rest) == prompt


@given(prompts)
def test_what_a_store_has_is_not_given_to_it_again(several: list[list[int]]) -> None:
    chains = [chain for chain, _ in map(cut, several) if chain is not None]
    all_at_once = rows(chains)
    known: set[bytes] = set()
    one_by_one: list[tuple[bytes, bytes, bytes]] = []
    for chain in chains:
        one_by_one += rows([chain], known)
        known.update(chain.digests)
    assert one_by_one == all_at_once
    assert len(one_by_one) == len(known)


@given(prompts)
def test_parents_come_first(several: list[list[int]]) -> None:
    seen = {b""}
    for digest, parent, _ in rows([chain for chain, _ in map(cut, several) if chain is not None]):
        assert parent in seen
        seen.add(digest)


@pytest.mark.parametrize("value", [[2**40], ["a"], [None], [1.5], "text", 3, None, {"a": 1}])
def test_what_is_no_list_of_token_ids_is_not_taken_for_one(value: Any) -> None:
    assert token_blocks.pack_ids(value) is None


@given(st.lists(st.floats(-100, 0, allow_nan=False)))
def test_log_probabilities_are_rounded_to_float32(logprobs: list[float]) -> None:
    packed = token_blocks.pack_logprobs("logprobs", logprobs)
    assert packed is not None
    again = token_blocks.read_logprobs(packed)
    assert again == pytest.approx(logprobs, rel=1e-6, abs=1e-37)
    assert token_blocks.pack_logprobs("logprobs", again) == packed


def test_log_probabilities_whose_sum_is_beyond_every_float_are_kept() -> None:
    packed = token_blocks.pack_logprobs("logprobs", [3e38] * 10)
    assert packed is not None
    assert len(token_blocks.read_logprobs(packed)) == 10
