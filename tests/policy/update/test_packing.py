"""Plans: every trained token is computed exactly once as a target, whatever the plan."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.assemble import token_tree
from agentlightning.errors import PolicyError
from agentlightning.policy.base import Sharing
from agentlightning.policy.losses import NLLLoss, PPOLoss
from agentlightning.policy.update.packing import CostModel, MicroBatch, plan
from agentlightning.policy.update.updater import for_losses
from agentlightning.trajectory import Node, TokenTree, TrainingSample, Trajectory, Transition

MODES = get_args(Sharing)


def sample(*calls: tuple[str, tuple[int, ...], int], zero: frozenset[str] = frozenset()) -> TrainingSample:
    """A tree of (rollout, prompt, number of sampled tokens); each sampled token has a weight of its own."""
    counts: dict[str, int] = {}
    made: list[Trajectory] = []
    for rollout, prompt, length in calls:
        counts[rollout] = counts.get(rollout, 0) + 1
        name, sampled = f"{rollout}{counts[rollout]}", tuple(range(90, 90 + length))
        call = Transition(rollout, "at", name, counts[rollout], prompt, sampled, (-1.0,) * length)
        made.append(Trajectory(rollout, "at", (call,)))
    tree = token_tree(made)
    sizes = [(n, len(n.token_ids) if n.sampled else 0) for n in tree.nodes]
    numbers = iter(range(1, 10_000))
    weights = tuple(tuple(float(next(numbers)) for _ in range(size)) for _, size in sizes)
    advantages = tuple((0.0 if n.rollout_id in zero else 1.0,) * size for n, size in sizes)
    return TrainingSample(tree, advantages=advantages, weights=weights)


def trained(batches: list[MicroBatch]) -> list[float]:
    """The weights of all targets, each of which names one token."""
    return sorted(weight for batch in batches for weight in batch.table.columns["weights"][batch.places].tolist())


GROUP = sample(*((name, (1, 2, 3, 4), 2) for name in "abcd"))
CHAIN = sample(("a", (1, 2), 2), ("a", (1, 2, 90, 91, 5), 1), ("a", (1, 2, 90, 91, 5, 90, 6), 3))


def test_calls_that_continue_one_another_are_one_row() -> None:
    (batch,) = plan([CHAIN], token_budget=100, sharing="merged")
    (row,) = batch.rows
    assert row.token_ids == (1, 2, 90, 91, 5, 90, 6, 90, 91, 92)
    assert row.targets.tolist() == [2, 3, 5, 7, 8, 9]
    assert batch.tokens == row.length == 9
    (alone,) = plan([CHAIN], token_budget=100, sharing="shared")
    assert not alone.joined, "a row that shares with no other is computed without a mask"


def test_rows_that_share_nothing_are_computed_without_a_mask_where_sharing_is_asked_for() -> None:
    apart = sample(("a", (1, 2, 3), 2), ("b", (4, 5, 6), 2), ("c", (7, 8, 9), 2))
    (batch,) = plan([apart], token_budget=100, sharing="shared")
    assert len(batch.lines) == 3
    assert not batch.joined


def test_one_row_for_each_call_is_there_to_compare_with() -> None:
    (batch,) = plan([CHAIN], token_budget=100, sharing="rows")
    assert sorted(row.targets.tolist() for row in batch.rows) == [[2, 3], [5], [7, 8, 9]]
    assert batch.tokens == 27


def test_a_groups_prompt_is_computed_once_but_for_its_last_token() -> None:
    (batch,) = plan([GROUP], token_budget=100, sharing="shared", join=False)
    assert (batch.shared_length, batch.families, len(batch.rows), batch.width) == (3, (4,), 4, 2)
    assert batch.tokens == 3 + 4 * 2


def test_answers_are_joined_to_one_line_where_that_is_cheaper_than_padding() -> None:
    lengths = (9, 1, 2, 1)
    group = sample(*((name, (1, 2, 3, 4), length) for name, length in zip("abcd", lengths, strict=True)))
    (batch,) = plan([group], token_budget=100, sharing="shared")
    assert (len(batch.lines), batch.joined) == (1, True)
    assert batch.tokens == 4 + 8, "the prompt, the longest answer but its last token; the others begin as it does"
    (padded,) = plan([group], token_budget=100, sharing="shared", join=False)
    assert padded.tokens == 3 + 4 * 9
    apart = sample(*((name, (1, 2, 3, 4, i), 9) for i, name in enumerate("abcd")))
    (dear,) = plan([apart], token_budget=100, sharing="shared", cost=CostModel(pair=0.1))
    assert not dear.joined, "joined, every token is compared with all others"


def test_a_line_has_every_token_of_a_tree_once_wherever_its_paths_part() -> None:
    turns = sample(
        ("a", (1, 2), 1), ("a", (1, 2, 90, 5, 6), 2), ("b", (1, 2, 90, 5, 7), 1), ("c", (1, 2, 8), 3), ("d", (1, 9), 1)
    )
    (batch,) = plan([turns], token_budget=100, sharing="shared", cost=CostModel(pair=0.0))
    (line,) = batch.lines
    unique = {row.token_ids[: i + 1] for row in line.rows for i in range(row.length)}
    assert len(line.token_ids) == batch.tokens == len(unique)
    for row, index in zip(line.rows, line.index, strict=True):
        assert tuple(line.token_ids[place] for place in index) == row.token_ids[:-1]


def test_targets_within_the_shared_part_are_predicted_there() -> None:
    forked = sample(("a", (1, 2), 2), ("a", (1, 2, 90, 91, 5, 6), 1), ("a", (1, 2, 90, 91, 7), 1))
    (batch,) = plan([forked], token_budget=100, sharing="shared", join=False)
    before = batch.predicting()
    assert batch.shared_length == 3
    assert sorted(before[before < 3]) == [1, 2], "targets 2 and 3, one token before each"
    assert len(before) == 4


def test_prompts_of_different_length_share_a_pass_by_the_shorter_prefix() -> None:
    longer = sample(*((name, (1, 2, 3, 4, 5), 2) for name in "abcd"))
    cost = CostModel(launch=1000)
    (batch,) = plan([GROUP, longer], token_budget=100, sharing="shared", cost=cost, join=False)
    assert (batch.shared_length, batch.families) == (3, (4, 4))
    assert batch.tokens == 2 * 3 + 8 * 3
    (joined,) = plan([GROUP, longer], token_budget=100, sharing="shared", cost=cost)
    assert (len(joined.lines), joined.width) == (2, 6), "each line has its own prompt"


def test_the_plan_shares_where_it_pays_and_only_there() -> None:
    long_prompt = sample(*((name, tuple(range(200)), 40) for name in "abcdefgh"))
    (shared,) = plan([long_prompt], token_budget=10_000, join=False)
    assert shared.shared_length == 199
    (plain,) = plan([GROUP], token_budget=10_000)
    assert plain.shared_length == 0


def test_sharing_that_pays_only_together_is_found() -> None:
    group = [sample(*((name, tuple(range(30)), 5) for name in "abcd")) for _ in range(8)]
    cost = CostModel(launch=100)
    assert plan(group[:1], token_budget=10_000, cost=cost, join=False)[0].shared_length == 0
    assert plan(group, token_budget=10_000, cost=cost, join=False)[0].families == (4,) * 8


def test_tokens_that_teach_nothing_are_not_computed() -> None:
    group = sample(("a", (1, 2), 5), ("b", (1, 2), 3), zero=frozenset({"a"}))
    (batch,) = plan(for_losses([group], [PPOLoss()]), token_budget=100, sharing="merged")
    assert [row.token_ids for row in batch.rows] == [(1, 2, 90, 91, 92)]
    (imitated,) = plan(for_losses([group], [NLLLoss()]), token_budget=100, sharing="merged")
    assert len(imitated.rows) == 2
    alone = sample(("a", (1, 2), 5), zero=frozenset({"a"}))
    assert plan(for_losses([alone], [PPOLoss()]), token_budget=100) == []


def test_a_call_is_whole_in_one_row_though_a_later_prompt_split_it() -> None:
    split = sample(("a", (1, 2), 3), ("a", (1, 2, 90, 7), 1), ("b", (1, 2), 1))
    (batch,) = plan([split], token_budget=100, sharing="merged")
    rows = {tuple(batch.table.call[row.places].tolist()) for row in batch.rows}
    assert sorted(map(len, rows)) == [1, 1, 3]
    assert all(len(set(calls)) == 1 for calls in rows)
    assert sorted(np.bincount(batch.table.rollout[batch.places]).tolist()) == [1, 4]


def test_a_call_is_trained_whole_or_not_at_all() -> None:
    tree = sample(("a", (1, 2), 3)).tree
    partly = TrainingSample(tree, advantages=[(), (0.0, 1.0, 0.0)], weights=[(), (0.0, 1.0, 1.0)])
    (batch,) = plan([partly], token_budget=100)
    assert len(batch.places) == 3


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    long = sample(("a", tuple(range(50)), 10), ("b", (1,), 2))
    assert [batch.tokens for batch in plan([long], token_budget=20)] == [59, 2]


def test_a_family_beyond_the_budget_is_cut() -> None:
    family = sample(*((f"{i:02}", tuple(range(40)), 10) for i in range(16)))
    batches = plan([family], token_budget=100, sharing="shared")
    assert all(batch.tokens <= 100 for batch in batches)
    assert sum(len(batch.rows) for batch in batches) == 16


def test_rows_of_very_different_length_are_not_padded_to_one_another() -> None:
    mixed = sample(("a", tuple(range(1000)), 5), *((f"b{i}", (7, i), 3) for i in range(10)))
    long, short = plan([mixed], token_budget=100_000, sharing="merged")
    assert (long.tokens, len(short.rows)) == (1004, 10)


def test_a_token_without_anything_before_it_cannot_be_trained() -> None:
    tree = TokenTree((Node(-1, (1, 2), sampled=True, logprobs=(0.0, 0.0), rollout_id="r", call="c-9"),))
    with pytest.raises(PolicyError, match="c-9 has no prompt"):
        plan([TrainingSample(tree, advantages=[(1.0, 1.0)], weights=[(0.5, 0.5)])], token_budget=10)


@st.composite
def samples(draw: st.DrawFn) -> TrainingSample:
    calls: list[tuple[str, tuple[int, ...], int]] = []
    ends: list[tuple[int, ...]] = [(1, 2, 3)]
    for _ in range(draw(st.integers(1, 7))):
        prompt = draw(st.sampled_from(ends))
        prompt = prompt[: draw(st.integers(1, len(prompt)))] + tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
        length = draw(st.integers(1, 4))
        calls.append((draw(st.sampled_from("abc")), prompt, length))
        ends.append(prompt + tuple(range(90, 90 + length)))
    return sample(*calls, zero=frozenset(draw(st.sets(st.sampled_from("abc"), max_size=1))))


@given(st.lists(samples(), min_size=1, max_size=3), st.sampled_from(MODES), st.integers(1, 60), st.integers(0, 100))
def test_every_trained_token_is_a_target_exactly_once(
    batch: list[TrainingSample], mode: Any, budget: int, launch: int
) -> None:
    expected = sorted(
        weight
        for each in batch
        for weights, advantages in zip(each.weights, each.advantages, strict=True)
        for weight, advantage in zip(weights, advantages, strict=True)
        if advantage
    )
    table = for_losses(batch, [PPOLoss()])
    batches = plan(table, token_budget=budget, sharing=mode, cost=CostModel(launch=float(launch)))
    assert trained(batches) == expected
    for each in batches:
        assert each.tokens <= budget or len(each.rows) == 1
        assert sum(each.families) in (0, len(each.rows))
        heads = iter(each.rows)
        for count in each.families:
            assert len({next(heads).token_ids[: each.shared_length] for _ in range(count)}) == 1
        before = each.predicting()
        assert len(before) == sum(len(row.targets) for row in each.rows)
        assert all(0 <= place < each.tokens for place in before)
