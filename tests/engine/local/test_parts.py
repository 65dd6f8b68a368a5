"""The parts of the generator, each against the plainest way to say what it does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local import cascade_attention, sampler
from agentlightning.engine.local.prefix_cache import PrefixStore, Segment, common_prefix
from agentlightning.engine.local.stop_strings import StopScanner
from agentlightning.testing.models import tiny_tokenizer

# -- drawing -----------------------------------------------------------------------------------------------------------

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([(), (), ((3, 5.0), (0, -100.0))]),
    top_logprobs=st.sampled_from([0, 0, 2, 20]),
)
BEFORE = [1, 2, 2, 3]
"""What every row has drawn before."""


def distribution(logits: list[float], chosen: SamplingParams) -> list[float]:
    """Probabilities that `chosen` leaves, in words: what was drawn before is less likely, what is biased more; of the
    rest none too far below the likeliest, the k largest, then the fewest of them that reach p."""
    bias = dict(chosen.logit_bias)
    for token in set(BEFORE):
        bias[token] = bias.get(token, 0) - chosen.presence_penalty - chosen.frequency_penalty * BEFORE.count(token)
    logits = [value + bias.get(token, 0.0) for token, value in enumerate(logits)]
    scaled = [value / (chosen.temperature or 1.0) for value in logits]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    if chosen.temperature:
        order = sorted(range(len(weights)), key=lambda i: -weights[i])[: chosen.top_k or None]
        order = [i for i in order if weights[i] >= chosen.min_p * (1 - 1e-6) * max(weights)]
        total, kept, reached = sum(weights[i] for i in order), set[int](), 0.0
        for i in order:
            if reached >= chosen.top_p * total:
                break
            kept.add(i)
            reached += weights[i]
        weights = [weight if i in kept else 0.0 for i, weight in enumerate(weights)]
    return [weight / sum(weights) for weight in weights]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(params, min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_every_row_is_drawn_from_its_own_distribution_with_its_own_logprob(
    rows: list[SamplingParams], seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 12, generator=numbers) * 2
    uniform = torch.rand(len(rows), generator=numbers, dtype=torch.float64)
    drawn = sampler.draw(logits, sampler.make_plan(rows, logits.device), uniform, [BEFORE] * len(rows))
    tokens, logprobs = drawn.tokens, drawn.logprobs
    for index, row in enumerate(rows):
        expected = distribution(logits[index].tolist(), row)
        token = int(tokens[index])
        assert expected[token] > 0
        assert float(logprobs[index]) == pytest.approx(math.log(expected[token]), abs=1e-4)
        if row.temperature == 0:
            assert token == max(range(12), key=lambda i: expected[i])
        else:
            before = sum(expected[:token])
            assert before - 1e-5 <= float(uniform[index]) <= before + expected[token] + 1e-5
        if row.top_logprobs and drawn.top_logprobs is not None and drawn.top_tokens is not None:
            likeliest = sorted((value for value in expected if value > 0), reverse=True)[: row.top_logprobs]
            named = drawn.top_logprobs[index, : len(likeliest)].exp().tolist()
            assert named == pytest.approx(likeliest, abs=1e-4)
            assert [expected[int(i)] for i in drawn.top_tokens[index, : len(likeliest)]] == pytest.approx(likeliest)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    plan = sampler.make_plan([SamplingParams()], logits.device)
    drawn = sampler.draw(logits, plan, torch.tensor([uniform], dtype=torch.float64))
    tokens, logprobs = drawn.tokens, drawn.logprobs
    assert int(tokens) in (1, 2)
    assert float(logprobs) == pytest.approx(math.log(0.5))


# -- stored prefixes ---------------------------------------------------------------------------------------------------

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def segment(tokens: list[int], start: int, stop: int) -> Segment:
    """Keys and values that say which tokens they are, with all that went before."""
    marks = [hash(tuple(tokens[: i + 1])) % 2**31 for i in range(start, stop)]
    return [torch.tensor(marks, dtype=torch.int64).view(1, 1, -1, 1).clone()]


def stored(store: PrefixStore, tokens: list[int]) -> list[int]:
    """What the store gives for `tokens`, token by token."""
    match = store.match(tokens)
    found = [part[0, 0, :, 0].tolist()[:count] for node, count in match.nodes for part in node.segment]
    marks = [mark for part in found for mark in part]
    assert len(marks) == match.length
    return marks


@settings(max_examples=100, deadline=None)
@given(sequences=sequences, asked=sequences)
def test_the_store_gives_the_longest_prefix_it_was_given(sequences: list[list[int]], asked: list[list[int]]) -> None:
    store = PrefixStore(1 << 20)
    for tokens in sequences:
        store.insert(tokens, lambda start, stop, tokens=tokens: segment(tokens, start, stop))
    for tokens in asked + sequences:
        longest = max(common_prefix(tokens, other) for other in sequences)
        assert stored(store, tokens) == segment(tokens, 0, longest)[0].flatten().tolist()
    unique = {tuple(tokens[: i + 1]) for tokens in sequences for i in range(len(tokens))}
    assert store.num_bytes == 8 * len(unique)
    store.clear()
    assert (store.num_bytes, len(store), store.match(sequences[0]).length) == (0, 0, 0)


@settings(max_examples=100, deadline=None)
@given(sequences=sequences, limit=st.integers(0, 20))
def test_a_full_store_forgets_the_oldest_and_stays_right(sequences: list[list[int]], limit: int) -> None:
    store = PrefixStore(8 * limit)
    for tokens in sequences:
        store.insert(tokens, lambda start, stop, tokens=tokens: segment(tokens, start, stop))
        assert store.num_bytes == sum(node.num_bytes for node in store._order) <= 8 * limit
        for other in sequences:
            marks = stored(store, other)
            assert marks == segment(other, 0, len(marks))[0].flatten().tolist()


def test_what_was_used_last_is_kept() -> None:
    store = PrefixStore(8 * 6)
    for tokens in ([1, 1, 1], [2, 2, 2]):
        store.insert(tokens, lambda start, stop, tokens=tokens: segment(tokens, start, stop))
    assert store.match([1, 1, 1]).length == 3
    store.insert([3, 3], lambda start, stop: segment([3, 3], start, stop))
    assert [store.match(tokens).length for tokens in ([1, 1, 1], [2, 2, 2], [3, 3])] == [3, 0, 2]


@given(left=st.lists(st.integers(0, 1), max_size=20), right=st.lists(st.integers(0, 1), max_size=20))
def test_the_common_prefix_is_as_long_as_it_looks(left: list[int], right: list[int]) -> None:
    equal = [a == b for a, b in zip(left, right, strict=False)]
    assert common_prefix(left, right) == (equal.index(False) if False in equal else len(equal))


# -- groups of rows ----------------------------------------------------------------------------------------------------


def test_rows_are_grouped_where_that_saves_most_reading() -> None:
    system, one, two = [1] * 64, [2] * 64, [3] * 64
    rows = [[*system, *one]] * 4 + [[*system, *two]] * 4
    groups = cascade_attention.find_groups([cascade_attention.fingerprints(row) for row in rows], [128] * 8, 1 << 20)
    assert groups is not None
    assert (groups.length, groups.rows) == (128, ((0, 1, 2, 3), (4, 5, 6, 7)))
    apart = [[*system, *([i] * 64)] for i in range(8)]
    groups = cascade_attention.find_groups([cascade_attention.fingerprints(row) for row in apart], [128] * 8, 1 << 20)
    assert groups is not None
    assert (groups.length, groups.rows) == (64, (tuple(range(8)),))


def test_rows_with_little_in_common_are_not_grouped() -> None:
    rows = [cascade_attention.fingerprints([i] * 64) for i in range(8)]
    assert cascade_attention.find_groups(rows, [64] * 8, 1 << 30) is None
    assert cascade_attention.find_groups([cascade_attention.fingerprints([1] * 64)] * 8, [64] * 8, 1) is None
    assert cascade_attention.find_groups([[]], [1], 1 << 30) is None


# -- stop strings ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("ab é漢🙂", min_size=1, max_size=30),
    stops=st.lists(st.text("ab é漢🙂", min_size=1, max_size=4), min_size=1),
)
def test_a_stop_string_is_seen_at_the_token_that_completes_it(text: str, stops: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    scanner = StopScanner(stops, lambda ids: tokenizer.decode(list(ids)))
    for end in range(1, len(tokens) + 1):
        so_far = tokenizer.decode(tokens[:end])
        expected = any(stop in so_far for stop in stops)
        assert scanner.push(tokens[end - 1]) == expected
        if expected:
            break
