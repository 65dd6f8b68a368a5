"""In a corridor of 30 steps with a reward at its end, state values give a clearer gradient than a uniform return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentlightning.credit.base import CreditContext, credit_rule

LENGTH, GROUP, GROUPS = 30, 8, 40
DECISIVE = {"1 of 2": ((11,), 2), "3 of 2": ((4, 13, 22), 2), "1 of 4": ((17,), 4)}


def gradients(make: Any, rule: Any, decisive: tuple[int, ...], actions: int, seed: int = 0) -> np.ndarray:
    """For each group, the gradient at a softmax policy that is uniform: [groups, steps, actions]. Action 0 is right."""
    rng = np.random.default_rng(seed)
    taken = rng.integers(actions, size=(GROUPS, GROUP, LENGTH))
    score = np.eye(actions)[taken] - 1 / actions
    found = np.zeros((GROUPS, LENGTH, actions))
    for g in range(GROUPS):
        group = []
        for i in range(GROUP):
            wrong = [step in decisive and taken[g, i, step] != 0 for step in range(LENGTH)]
            states = [f"{step} {'lost' if any(wrong[:step]) else 'fine'}" for step in range(LENGTH)]
            group.append(make(f"{g}-{i}", float(not any(wrong)), states, tokens=1, messages=False))
        (credit,) = credit_rule(rule).assign([group], CreditContext())
        if credit is not None:
            found[g] = np.einsum("it,ita->ta", np.array(credit.advantages), score[g])
    return found


def signal_to_noise(found: np.ndarray) -> float:
    """|E g|^2 / trace of Cov(g): rollouts for the same signal are inversely proportional to it. The expectation is
    estimated without bias from pairs of different groups."""
    flat = found.reshape(len(found), -1)
    total = flat.sum(axis=0)
    squares = float((flat**2).sum())
    signal = (float(total @ total) - squares) / (len(flat) * (len(flat) - 1))
    return signal / max(1e-12, squares / len(flat) - signal)


@pytest.mark.parametrize("case", DECISIVE)
def test_state_values_have_at_least_three_times_the_signal_to_noise_of_a_uniform_return(make: Any, case: str) -> None:
    uniform = gradients(make, {"type": "uniform", "normalize_std": False}, *DECISIVE[case])
    by_state = gradients(make, {"type": "state_value", "pool": 0}, *DECISIVE[case])
    assert signal_to_noise(by_state) > 3 * max(signal_to_noise(uniform), 0.0)
    assert signal_to_noise(by_state) > 0
