"""How a rollout was divided into calls, and calls into rows and micro-batches, leaves the gradient of a loss
unchanged."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import tiny_model

from agentlightning.credit import training_samples
from agentlightning.policy.losses import COUNT, FACTOR, LOSSES, MARGIN, token_losses
from agentlightning.policy.mismatch import corrections
from agentlightning.policy.update.updater import Updater, corrected, for_losses, normalized
from agentlightning.trajectory import TrainingSample, Trajectory, Transition

torch.set_num_threads(1)  # more threads cost more than they bring at this size

SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.9, "clip_high": 9.0},  # so wide that most rollouts learn
    "turn": {"clip_low": 0.9, "clip_high": 9.0},
    "entropy": {"smoothing": 0.5},
    "importance, rollout": {"level": "rollout"},
}
TESTED = [*sorted(set(LOSSES) - {"value"}), "importance, rollout"]
DEPENDS_ON_CALLS = {"turn"}
"""Losses with a ratio for each call, which do not claim that dividing a call changes nothing."""


@pytest.fixture(scope="module")
def updater() -> Updater:
    made = Updater(tiny_model())
    made.entropy = 3.0, 1
    return made


def rollout(name: str, seed: int, prompt: Sequence[int], turns: int, reward: float) -> Trajectory:
    """Calls that continue one another, with new prompt tokens between them."""
    draw = random.Random(f"{name}{seed}")
    history, calls = list(prompt), list[Transition]()
    for turn in range(turns):
        sampled = tuple(draw.randrange(300) for _ in range(draw.randint(1, 6)))
        logprobs = tuple(-3.0 - (token % 7) / 3 for token in sampled)
        calls.append(Transition(name, "at", f"{name}-{turn}", turn, tuple(history), sampled, logprobs))
        history += [*sampled, *(draw.randrange(300) for _ in range(draw.randint(1, 3)))]
    return Trajectory(name, "at", tuple(calls), reward)


def group(seed: int) -> list[list[Trajectory]]:
    draw = random.Random(seed)
    made: list[list[Trajectory]] = []
    for g in range(draw.randint(1, 2)):
        prompt = [draw.randrange(300) for _ in range(draw.randint(2, 6))]
        count = draw.randint(2, 3)
        made.append([rollout(f"{g}.{i}", seed, prompt, draw.randint(1, 3), float(i)) for i in range(count)])
    return made


def samples(groups: Sequence[Sequence[Trajectory]]) -> list[TrainingSample]:
    """With every column that a loss reads, each a function of the token, so that it does not depend on the tree."""

    def column(sample: TrainingSample, name: str) -> list[Any]:
        offset = sum(map(ord, name)) % 11
        nodes = [n.token_ids if n.sampled else () for n in sample.tree.nodes]
        return [np.array([-3.0 - ((t + offset) % 11) / 5 for t in ids], np.float32) for ids in nodes]

    made = training_samples(groups)[0]
    names = ("ref_logprobs", "teacher_logprobs", "proximal_logprobs", MARGIN, FACTOR, COUNT)
    return [replace(s, columns={**s.columns, **{name: column(s, name) for name in names}}) for s in made]


def divide(trajectory: Trajectory, draw: random.Random) -> Trajectory:
    """The same tokens by more calls: an answer is asked for in two parts."""
    calls: list[Transition] = []
    for each in trajectory.transitions:
        at = draw.randint(0, len(each.response_token_ids) - 1)
        if at:
            calls.append(replace(each, response_token_ids=each.response_token_ids[:at], logprobs=each.logprobs[:at]))
            longer = each.prompt_token_ids + each.response_token_ids[:at]
            each = replace(each, prompt_token_ids=longer, response_token_ids=each.response_token_ids[at:])
            each = replace(each, span_id=f"{each.span_id}+", logprobs=each.logprobs[at:])
        calls.append(each)
    return replace(trajectory, transitions=tuple(calls))


def reorder(trajectory: Trajectory, draw: random.Random) -> Trajectory:
    calls = draw.sample(trajectory.transitions, len(trajectory.transitions))
    return replace(trajectory, transitions=tuple(replace(c, sequence_id=n) for n, c in enumerate(calls)))


def gradient(updater: Updater, batch: Sequence[TrainingSample], loss: Any, mismatch: Any, **plan: Any) -> torch.Tensor:
    losses = token_losses(loss)
    prepared, within = for_losses(batch, losses), corrections(mismatch)
    if "interpolation" not in batch[0].columns:
        prepared, _ = corrected(prepared, within)
    else:
        prepared = replace(prepared, corrections=within)
    updater.optimizer.zero_grad()
    updater.accumulate(updater.forward.plan(normalized(prepared, losses), **plan), losses)
    return torch.cat([p.grad.flatten() for p in updater.optimizer.parameters if p.grad is not None])


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()


@pytest.mark.parametrize("name", TESTED)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10_000),
    change=st.sampled_from([divide, reorder]),
    mode=st.sampled_from(["rows", "merged", "shared"]),
    budget=st.integers(1, 80),
)
def test_dividing_merging_reordering_and_packing_leave_the_gradient_unchanged(
    updater: Updater, name: str, seed: int, change: Any, mode: Any, budget: int
) -> None:
    draw = random.Random(seed)
    plain = group(seed)
    changed = [draw.sample([change(t, draw) for t in each], len(each)) for each in plain]
    if name in DEPENDS_ON_CALLS and change is divide:
        changed = plain
    loss = {"type": name.partition(",")[0], **SETTINGS.get(name, {})}
    mismatch = ["truncate", {"type": "geometric_mask", "low": 0.8, "high": 1.3}]
    expected = gradient(updater, samples(plain), loss, mismatch, token_budget=10_000, sharing="merged")
    found = gradient(updater, samples(changed), loss, mismatch, token_budget=budget, sharing=mode)
    assert apart(found, expected) < 2e-5


def interpolated(groups: Sequence[Sequence[Trajectory]]) -> list[TrainingSample]:
    """With an interpolation that is a function of the token."""
    made = training_samples(groups)[0]
    columns = [
        [np.array([(t % 3) / 4 for t in n.token_ids] if n.sampled else [], np.float32) for n in s.tree.nodes]
        for s in made
    ]
    return [replace(s, columns={**s.columns, "interpolation": c}) for s, c in zip(made, columns, strict=True)]


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
@settings(max_examples=5)
@given(
    seed=st.integers(0, 10_000),
    change=st.sampled_from([divide, reorder]),
    mode=st.sampled_from(["rows", "merged", "shared"]),
    budget=st.integers(1, 80),
)
def test_with_interpolated_proximal_log_probabilities_too(
    updater: Updater, name: str, seed: int, change: Any, mode: Any, budget: int
) -> None:
    draw = random.Random(seed)
    plain = group(seed)
    changed = [draw.sample([change(t, draw) for t in each], len(each)) for each in plain]
    loss = {"type": name, **SETTINGS.get(name, {})}
    expected = gradient(updater, interpolated(plain), loss, "truncate", token_budget=10_000, sharing="merged")
    found = gradient(updater, interpolated(changed), loss, "truncate", token_budget=budget, sharing=mode)
    assert apart(found, expected) < 2e-5


def one_row_per_call(groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """What a trainer without trees has: every call is a sequence of its own, with the reward of its rollout."""
    return [
        [
            Trajectory(c.span_id, "at", (replace(c, rollout_id=c.span_id),), t.reward)
            for t in each
            for c in t.transitions
        ]
        for each in groups
    ]


@pytest.mark.parametrize(
    ("loss", "mismatch"),
    [
        ({"type": "gspo", "clip_low": 0.9, "clip_high": 9.0}, "off"),
        ("importance", {"type": "sequence_mask", "low": 0.3, "high": 3.0}),
        ("importance", {"type": "truncate", "level": "sequence"}),
    ],
    ids=["gspo", "sequence mask", "sequence truncation"],
)
def test_with_one_row_for_each_call_a_divided_rollout_is_another_one_and_in_a_tree_it_is_the_same(
    updater: Updater, loss: Any, mismatch: Any
) -> None:
    draw = random.Random(5)
    whole = [[rollout(f"r{i}", 5, (1, 2, 3), 2, float(i)) for i in range(4)]]
    divided = [[divide(each, draw) for each in whole[0]]]
    assert sum(len(t.transitions) for t in divided[0]) > sum(len(t.transitions) for t in whole[0])

    trees = [gradient(updater, samples(each), loss, mismatch) for each in (whole, divided)]
    assert apart(trees[1], trees[0]) < 1e-5
    rows = [gradient(updater, samples(one_row_per_call(each)), loss, mismatch) for each in (whole, divided)]
    assert apart(rows[1], rows[0]) > 0.05


def test_a_rollout_in_several_micro_batches_has_one_ratio(updater: Updater) -> None:
    batch = samples([[rollout(f"r{i}", 1, (1, 2, 3), 3, float(i)) for i in range(2)]])
    loss = {"type": "gspo", **SETTINGS["gspo"]}
    plans = updater.forward.plan(batch, token_budget=1, sharing="rows")
    parts = [set(each.table.rollout[each.places].tolist()) for each in plans]
    assert len(parts) > len(set.union(*parts)), "rollouts are divided"
    expected = gradient(updater, batch, loss, "off", token_budget=10_000)
    assert apart(gradient(updater, batch, loss, "off", token_budget=1, sharing="rows"), expected) < 1e-5
