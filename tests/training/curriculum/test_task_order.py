"""What the orders of tasks promise: epochs miss none; learnability prefers what can be learned, and forgets nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.config import CurriculumConfig
from agentlightning.errors import DatasetError
from agentlightning.task import tasks_of_step
from agentlightning.training.persistence.run_dir import TaskRecord
from agentlightning.training.sources.stream import LearnabilityOrder

LEARNABILITY = CurriculumConfig(tasks="learnability")


def trained(
    order: LearnabilityOrder, rewards: Callable[[int, int], list[float]], turns: int, count: int = 4
) -> Counter[int]:
    """How often each task was drawn, where a group of task i has `rewards(i, turn)`."""
    drawn: Counter[int] = Counter()
    for turn in range(turns):
        for index in order.draw(turn, count):
            drawn[index] += 1
            order.observe(index, rewards(index, turn))
    return drawn


def test_epochs_draw_every_task_once() -> None:
    assert sorted(tasks_of_step(8, 4, 0, seed=3) + tasks_of_step(8, 4, 1, seed=3)) == list(range(8))


def test_every_task_is_tried_before_any_is_drawn_often() -> None:
    order = LearnabilityOrder(10, 0, LEARNABILITY, {})
    drawn = trained(order, lambda index, turn: [0.0, 1.0], turns=5)
    assert set(drawn) == set(range(10)), "half of each turn is untried tasks: 5 turns of 4 try all 10"


def test_tasks_whose_rollouts_differ_are_drawn_more_often_than_solved_and_hopeless_ones() -> None:
    rewards = {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [0.0, 1.0], 3: [1.0, 0.0]}
    order = LearnabilityOrder(20, 0, LEARNABILITY, {})
    drawn = trained(order, lambda index, turn: rewards[index % 4], turns=60)
    learnable = sum(drawn[index] for index in range(20) if index % 4 >= 2)
    assert learnable > 0.8 * drawn.total()


def test_solved_tasks_come_back_by_their_age() -> None:
    order = LearnabilityOrder(12, 0, LEARNABILITY, {})
    drawn = trained(order, lambda index, turn: [0.0, 1.0] if index < 6 else [1.0, 1.0], turns=100)
    assert all(drawn[index] >= 2 for index in range(6, 12))


@pytest.mark.parametrize("staleness", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("lost", [1, 2, 5])
def test_a_task_whose_first_groups_had_no_reward_is_drawn_again(lost: int, staleness: float) -> None:
    settings = CurriculumConfig(tasks="learnability", staleness_share=staleness)
    order, draws = LearnabilityOrder(20, 0, settings, {}), Counter[int]()

    def rewards(index: int, turn: int) -> list[float]:
        draws[index] += 1
        return [] if index in (7, 8) and draws[index] <= lost else [0.0, 1.0]

    drawn = trained(order, rewards, turns=200)
    others = [count for index, count in drawn.items() if index not in (7, 8)]
    assert min(drawn[7], drawn[8]) > 0.5 * min(others)
    assert order.metrics()["curriculum_tasks_tried"] == 20


def test_a_task_that_never_has_a_reward_takes_no_more_than_its_share() -> None:
    order = LearnabilityOrder(10, 0, LEARNABILITY, {})
    drawn = trained(order, lambda index, turn: [] if index == 3 else [0.0, 1.0], turns=100)
    assert 10 < drawn[3] < 80, "400 draws of 10 tasks"
    assert order.metrics()["curriculum_tasks_tried"] == 9


def test_tasks_that_still_run_are_not_drawn_again_before_others_are_tried() -> None:
    order = LearnabilityOrder(32, 0, LEARNABILITY, {})
    drawn = [index for turn in range(4) for index in order.draw(turn, 8)]
    assert sorted(drawn) == list(range(32)), "no group has finished yet"


def test_a_state_without_the_count_of_groups_without_reward_is_read() -> None:
    record = msgspec.json.decode(b"[3.0, 2, 0.5, 0.5, 0.5]", type=TaskRecord)
    order = LearnabilityOrder(2, 0, LEARNABILITY, {0: record})
    order.observe(0, [])
    assert msgspec.to_builtins(order.state[0]) == [3, 2, 0.5, 0.5, 0.5, 1]


def test_without_a_share_for_age_what_was_solved_stays_away() -> None:
    order = LearnabilityOrder(12, 0, CurriculumConfig(tasks="learnability", staleness_share=0.0), {})
    drawn = trained(order, lambda index, turn: [0.0, 1.0] if index < 6 else [1.0, 1.0], turns=100)
    assert all(drawn[index] == 1 for index in range(6, 12))


def test_a_forgotten_task_is_learned_again_and_counted() -> None:
    order = LearnabilityOrder(8, 0, LEARNABILITY, {})
    for index in range(8):
        for _ in range(4):
            order.observe(index, [1.0, 1.0])
    for _ in range(3):
        order.observe(5, [0.0, 0.0])
    drawn = Counter(index for turn in range(1, 60) for index in order.draw(turn, 1))
    assert drawn[5] > 0.7 * drawn.total()
    assert order.metrics() == {
        "curriculum_tasks_tried": 8.0,
        "curriculum_tasks_with_spread": 0.0,
        "curriculum_tasks_forgotten": 1.0,
    }


@given(count=st.integers(1, 9), turns=st.integers(1, 6), number=st.integers(1, 12), seed=st.integers(0, 3))
def test_a_resumed_order_draws_what_an_undisturbed_one_draws(count: int, turns: int, number: int, seed: int) -> None:
    def rewards(index: int, turn: int) -> list[float]:
        return [float(index % 2), float((index + turn) % 3)]

    order = LearnabilityOrder(number, seed, LEARNABILITY, {})
    trained(order, rewards, turns, count)
    resumed = LearnabilityOrder(
        number, seed, LEARNABILITY, msgspec.json.decode(msgspec.json.encode(order.state), type=dict[int, TaskRecord])
    )
    drawn = order.draw(turns, count)
    assert drawn == resumed.draw(turns, count)
    assert len(drawn) == count
    assert set(drawn) <= set(range(number))


@given(count=st.integers(1, 9), number=st.integers(9, 20), turns=st.integers(1, 5))
def test_a_turn_has_no_task_twice_once_all_are_known(count: int, number: int, turns: int) -> None:
    order = LearnabilityOrder(number, 0, LEARNABILITY, {})
    for index in range(number):
        order.observe(index, [0.0, 1.0])
    for turn in range(turns):
        assert len(set(order.draw(turn, count))) == count


def test_no_tasks_are_refused() -> None:
    with pytest.raises(DatasetError, match="no tasks"):
        LearnabilityOrder(0, 0, LEARNABILITY, {})
