"""What the filter of groups promises: the share asked for, those that differ most, in their order."""

from __future__ import annotations

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithms.lightning_rl import most_uncertain
from agentlightning.trajectory import Trajectory

GROUPS = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=4), min_size=1, max_size=9)


def group(name: int, rewards: list[float]) -> list[Trajectory]:
    return [Trajectory(f"r{name}-{i}", "a", (), reward=reward, group=str(name)) for i, reward in enumerate(rewards)]


@given(rewards=GROUPS, share=st.floats(0.01, 1.0))
def test_no_group_that_is_left_out_differs_more_than_one_that_is_kept(rewards: list[list[float]], share: float) -> None:
    groups = [group(name, own) for name, own in enumerate(rewards)]
    kept = most_uncertain(groups, share)
    names = [int(each[0].group) for each in kept]
    assert len(kept) == min(len(groups), math.ceil(share * len(groups)))
    assert names == sorted(names)
    out = [statistics.pstdev(own) for name, own in enumerate(rewards) if name not in names]
    assert max(out, default=0.0) <= min(statistics.pstdev(rewards[name]) for name in names) + 1e-12


def test_dimensions_count_by_their_weights() -> None:
    weights = {"right": 1.0, "style": 0.0}
    style, right = (
        [Trajectory(f"{name}{i}", "a", (), reward(i), name, weights=weights) for i in range(2)]
        for name, reward in {
            "style": lambda i: {"right": 1.0, "style": 9.0 * i},
            "right": lambda i: {"right": 1.0 * i, "style": 0.0},
        }.items()
    )
    assert most_uncertain([style, right], 0.5) == [right]


def test_groups_without_a_reward_go_first() -> None:
    unknown = [Trajectory("u", "a", (), reward=None, group="u")]
    assert most_uncertain([unknown, group(1, [1.0, 1.0])], 0.5) == [group(1, [1.0, 1.0])]
