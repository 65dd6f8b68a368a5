"""Which rank computes which tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.models import tiny_model

from agentlightning.policy.fsdp.policy import divide
from agentlightning.policy.update.forward import Forward
from agentlightning.trajectory import Node, TokenTree, TrainingSample

prices = st.lists(st.floats(0, 1e6), max_size=30)


@given(prices, st.integers(1, 6))
def test_every_tree_that_costs_something_is_on_one_rank_whole(prices: list[float], ranks: int) -> None:
    parts = divide(prices, ranks)
    assert len(parts) == ranks
    assert sorted(i for part in parts for i in part) == [i for i, price in enumerate(prices) if price > 0]


@given(prices, st.integers(1, 6))
def test_no_rank_has_more_than_its_share_and_one_tree(prices: list[float], ranks: int) -> None:
    loads = [sum(prices[i] for i in part) for part in divide(prices, ranks)]
    assert max(loads) <= sum(prices) / ranks + max(prices, default=0.0) + 1e-6


def test_one_long_tree_is_balanced_by_many_short_ones() -> None:
    assert divide([1.0, 8.0, 3.0, 2.0, 2.0], 2) == [[1], [0, 2, 3, 4]]


def tree(length: int, weight: float = 1.0) -> TrainingSample:
    nodes = (Node(-1, (1, 2)), Node(0, (3,) * length, True, (-1.0,) * length, "r", "c"))
    return TrainingSample(TokenTree(nodes), columns={"weights": [(), (weight,) * length]})


def test_the_price_grows_with_the_tokens_and_is_0_where_nothing_is_trained() -> None:
    forward = Forward(tiny_model())
    plans = [forward.plan([each]) for each in (tree(3), tree(60), tree(9, weight=0.0))]
    short, long, none = (sum(map(forward.cost.price, batches)) for batches in plans)
    assert 0 < short < long
    assert none == 0
