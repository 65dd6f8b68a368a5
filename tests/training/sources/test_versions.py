"""The age of a token is the number of updates since it was sampled; resumes do not make it older."""

from __future__ import annotations

import pytest

from agentlightning.policy.learner import age, updates_of
from agentlightning.trajectory import Trajectory, Transition


def trajectory(*versions: int | None) -> Trajectory:
    calls = [Transition("ro", "at", f"s{n}", n, (1,), (2,), (-0.1,), version) for n, version in enumerate(versions)]
    return Trajectory("ro", "at", tuple(calls))


@pytest.mark.parametrize(("versions", "expected"), [((5, 5), 0), ((5, 3), 2), ((None, 4), 1), ((None,), 0), ((), 0)])
def test_the_oldest_token_counts(versions: tuple[int | None, ...], expected: int) -> None:
    assert age(trajectory(*versions), 5) == expected


def test_an_answer_across_an_update_has_tokens_of_both_versions() -> None:
    call = Transition("ro", "at", "s", 0, (1,), (2, 3), (-0.1, -0.2), 6, ((4, 1), (6, 1)))
    assert age(Trajectory("ro", "at", (call,)), 6) == 2


def test_loading_a_checkpoint_makes_nothing_older() -> None:
    resumes = [(5, 8), (9, 12)]
    assert [updates_of(version, resumes) for version in (4, 5, 6, 8, 9, 10, 12, 13)] == [4, 5, 6, 5, 6, 7, 6, 7]
    assert age(trajectory(9), 12, resumes) == 0
    assert age(trajectory(5), 12, resumes) == 1


def test_calls_of_an_adapter_age_by_its_own_updates() -> None:
    calls = [
        Transition("ro", "at", model, 0, (1,), (2,), (-0.1,), version, model=model)
        for model, version in (("policy", 9), ("policy:base", 0), ("policy:writer", 6))
    ]
    own = {"policy": 9, "policy:base": 0, "policy:writer": 7}
    assert age(Trajectory("ro", "at", tuple(calls)), 9, by_model=own) == 1
