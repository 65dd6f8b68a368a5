"""Sampling of a batch, compared with a plain reference implementation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local import sampler

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
"""Tokens that every row has sampled before."""


def distribution(logits: list[float], chosen: SamplingParams) -> list[float]:
    """Reference implementation: penalties and bias, then min_p, then the k largest, then the fewest of them that reach
    p."""
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


@settings(max_examples=60)
@given(rows=st.lists(params, min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_every_row_is_sampled_from_its_own_distribution_with_its_own_logprob(
    rows: list[SamplingParams], seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 12, generator=numbers) * 2
    uniform = torch.rand(len(rows), generator=numbers, dtype=torch.float64)
    sampled = sampler.sample_tokens(logits, sampler.batch_params(rows, logits.device), uniform, [BEFORE] * len(rows))
    tokens, logprobs = sampled.tokens, sampled.logprobs
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
        if row.top_logprobs and sampled.top_logprobs is not None and sampled.top_tokens is not None:
            most_likely = sorted((value for value in expected if value > 0), reverse=True)[: row.top_logprobs]
            named = sampled.top_logprobs[index, : len(most_likely)].exp().tolist()
            assert named == pytest.approx(most_likely, abs=1e-4)
            assert [expected[int(i)] for i in sampled.top_tokens[index, : len(most_likely)]] == pytest.approx(
                most_likely
            )


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_a_token_of_probability_zero_is_never_sampled(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    batch = sampler.batch_params([SamplingParams()], logits.device)
    sampled = sampler.sample_tokens(logits, batch, torch.tensor([uniform], dtype=torch.float64))
    tokens, logprobs = sampled.tokens, sampled.logprobs
    assert int(tokens) in (1, 2)
    assert float(logprobs) == pytest.approx(math.log(0.5))
