"""Micro-batches written down by hand, and a two-answer bandit for losses to learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.support.models import tiny_model

from agentlightning.credit import training_samples
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.losses import TokenBatch
from agentlightning.policy.update.updater import Updater
from agentlightning.trajectory import Trajectory, Transition

Rows = Sequence[tuple[float, float, float, float]]
"""(log-probability now, when sampled, advantage, weight) of each token."""
MakeBatch = Callable[..., TokenBatch]


@pytest.fixture
def batch() -> MakeBatch:
    def make(rows: Rows, calls: Sequence[int] | None = None) -> TokenBatch:
        columns = torch.tensor(rows, dtype=torch.float32).T
        call = torch.tensor(range(len(rows)) if calls is None else calls)
        named = {"sampled_logprobs": columns[1], "advantages": columns[2], "weights": columns[3]}
        return TokenBatch(columns[0].clone().requires_grad_(), named, call=call, rollout=call)

    return make


@pytest.fixture
def probability_of_rewarded_answer() -> Callable[[str], tuple[float, float]]:
    """Train a tiny model with a loss for some steps, two answers to one prompt, one of them rewarded; its probability
    among the two before and after."""

    def learn(loss: str) -> tuple[float, float]:
        torch.set_num_threads(1)
        updater = Updater(tiny_model(), OptimizerConfig(lr=3e-3))
        prompt, answers = (1, 2, 3), ((7, 9), (8, 9))
        found: list[float] = []
        for _ in range(9):
            scores = [_logprobs(updater, prompt, answer) for answer in answers]
            found.append(float(torch.tensor([sum(each) for each in scores]).softmax(0)[0]))
            group = [
                Trajectory(name, "at", (Transition(name, "at", name, 1, prompt, answer, score),), reward)
                for name, answer, score, reward in zip("ab", answers, scores, (1.0, 0.0), strict=True)
            ]
            updater.step(training_samples([group])[0], UpdateOptions(loss=loss))
        return found[0], found[-1]

    return learn


def _logprobs(updater: Updater, prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[float, ...]:
    with torch.no_grad():
        logits = updater.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return tuple(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
