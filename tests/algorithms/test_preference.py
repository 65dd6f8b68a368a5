"""DPO's update makes what is preferred more likely than what is not, by margins against the reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models import tiny_model

from agentlightning.algorithms.base import unusable
from agentlightning.algorithms.preference import DPO
from agentlightning.algorithms.training import Collected
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.updater import Updater
from agentlightning.trajectory import TokenTree, Trajectory, Transition

GOOD, BAD = (41, 42, 43), (61, 62)


def session(name: str, reward: Any, *answers: Sequence[int], group: str = "g") -> Trajectory:
    """One call for each answer, each continuing the one before."""
    history, calls = (1, 2, 3), list[Transition]()
    for number, answer in enumerate(answers):
        logprobs = (-1.0,) * len(answer)
        calls.append(Transition(name, "a", f"{name}-{number}", number + 1, history, tuple(answer), logprobs))
        history += (*answer, 5)
    return Trajectory(name, "a", tuple(calls), reward=reward, group=group)


class Model:
    """A tiny model that learns in this process, and the weights that it started from as the reference."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.updater = Updater(tiny_model(), OptimizerConfig(lr=3e-3))
        self.start = Forward(copy.deepcopy(self.updater.model))

    async def score(self, trees: Sequence[TokenTree], what: set[str], *, reference: Path | None = None) -> Any:
        forward = self.start if "ref_logprobs" in what else self.updater.forward
        return {name: forward.score(trees, {"logprobs"})["logprobs"] for name in what}

    def logprob(self, trajectory: Trajectory) -> float:
        found = 0.0
        for call in trajectory.transitions:
            ids = torch.tensor([[*call.prompt_token_ids, *call.response_token_ids]])
            with torch.no_grad():
                logits = self.updater.model(ids).logits[0, len(call.prompt_token_ids) - 1 : -1]
            chosen = torch.tensor(call.response_token_ids)[:, None]
            found += float(logits.log_softmax(-1).gather(1, chosen).sum())
        return found


class Training:
    """A run over the same sessions in each step."""

    target_agent = None

    def __init__(self, sessions: Sequence[Trajectory], learner: Any) -> None:
        self.sessions, self.learner, self.step = tuple(sessions), learner, 0
        self.metrics: list[dict[str, float]] = []
        self.updates: list[Any] = []

    async def starting_weights(self) -> Path | None:
        return None

    async def collect(self, **request: Any) -> Collected:
        return Collected(self.sessions)

    async def update(self, samples: Sequence[Any], options: UpdateOptions) -> dict[str, float]:
        self.updates.append(samples)
        return self.learner.updater.step(samples, options) if isinstance(self.learner, Model) else {}

    async def finish_step(self, collected: Collected, metrics: dict[str, float]) -> None:
        self.step += 1
        self.metrics.append(metrics)


def pair(good: float = 1.0, bad: float = 0.0) -> tuple[Trajectory, Trajectory]:
    return session("good", good, GOOD, (44,)), session("bad", bad, BAD, (63, 64))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("loss", ["dpo", {"type": "ipo", "beta": 0.5}, {"type": "simpo", "gamma": 0.5}, "kto"])
async def test_the_better_session_becomes_more_likely_than_the_worse_one(loss: Any, order: int) -> None:
    good, bad = pair()
    model = Model()
    before = model.logprob(good) - model.logprob(bad)
    training = Training((good, bad)[::order], model)
    await DPO(steps=3, loss=loss).run(training)  # type: ignore[arg-type]
    assert model.logprob(good) - model.logprob(bad) > before + 0.5
    assert training.metrics[-1]["margin"] > training.metrics[0]["margin"]


@pytest.mark.parametrize("reward", [1.0, 0.0])
async def test_a_good_session_alone_becomes_more_likely_with_kto_and_a_bad_one_less(reward: float) -> None:
    (alone, _), model = pair(good=reward), Model()
    before = model.logprob(alone)
    await DPO(steps=3, loss="kto").run(Training([alone], model))  # type: ignore[arg-type]
    assert (model.logprob(alone) > before) == (reward == 1.0)


class Scores:
    """Log-probabilities that are given: -1 for each token; under the reference -1 / 4, from token 60 on -1 / 2."""

    async def score(self, trees: Sequence[TokenTree], what: set[str], *, reference: Path | None = None) -> Any:
        def column(name: str, tree: TokenTree) -> tuple[Any, ...]:
            rows = [np.array(node.token_ids if node.sampled else (), np.int64) for node in tree.nodes]
            return tuple(np.where(ids < 60, -0.25, -0.5) if name == "ref_logprobs" else ids * 0.0 - 1 for ids in rows)

        return {name: [column(name, tree) for tree in trees] for name in what}


# What is preferred has 4 tokens, the other one 8.
LONG_BAD = session("bad", 0.0, (61,) * 5, (62,) * 3)


@pytest.mark.parametrize(
    ("loss", "margins"),
    [
        ("dpo", [(-4 + 1) - (-8 + 4)]),
        ("ipo", [(-1 + 0.25) - (-1 + 0.5)]),
        ("simpo", [-1 - -1]),
        ("kto", [-4 + 1, -(-8 + 4)]),  # The mean is negative, so the baseline is 0.
    ],
)
async def test_margins_are_against_the_reference(loss: str, margins: list[float]) -> None:
    training = Training([pair()[0], LONG_BAD], Scores())
    await DPO(steps=1, loss=loss).run(training)  # type: ignore[arg-type]
    found = [
        {float(value) for column in sample.columns["preference_margin"] for value in column}
        for sample in training.updates[0]
    ]
    assert found == [{margin} for margin in margins]
    if loss == "dpo":
        assert (training.metrics[0]["margin"], training.metrics[0]["accuracy"]) == (1.0, 1.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), {"right": float("nan"), "short": 1.0}])
def test_a_reward_that_is_not_finite_rejects_its_session_alone(reward: Any) -> None:
    weights = {"right": 1.0, "short": 0.0} if isinstance(reward, dict) else None
    found = unusable([replace(session("wrong", reward, GOOD), weights=weights)], None)
    assert [(each.rollout_id, each.reason) for each in found] == [("wrong", "bad_reward")]
    assert "which is not finite" in found[0].message


def test_rollouts_that_never_called_the_policy_are_told_where_calls_have_to_go() -> None:
    silent = [replace(session("r1", 1.0, GOOD), transitions=()), replace(session("r2", 0.0, GOOD), transitions=())]
    for found in (unusable(silent, None), unusable(silent, "writer")):
        assert [each.reason for each in found] == ["no_policy_calls"] * 2
        assert "OPENAI_BASE_URL" in found[0].message
    [one] = unusable([silent[0], session("r3", 0.0, GOOD)], None)
    assert (one.rollout_id, one.message) == ("r1", "no call is of the policy")


@pytest.mark.parametrize("loss", ["dpo", "kto"])
async def test_factors_are_positive_for_what_is_preferred_alone(loss: str) -> None:
    training = Training([LONG_BAD, pair()[0]], Scores())
    await DPO(steps=1, loss=loss).run(training)  # type: ignore[arg-type]
    signs = {
        (node.rollout_id, float(value))
        for sample in training.updates[0]
        for node, column in zip(sample.tree.nodes, sample.columns["preference_factor"], strict=True)
        for value in column
    }
    assert signs == {("good", 1.0), ("bad", -1.0)}
