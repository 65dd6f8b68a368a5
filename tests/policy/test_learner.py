"""An update holds calls back no longer than it must; and the age of training samples, in updates of the weights."""

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentlightning.policy.base import Capabilities, UpdateOptions
from agentlightning.policy.learner import Learner, staleness
from agentlightning.trajectory import Node, TokenTree, TrainingSample


def sample(*parts: tuple[int | None, float, int]) -> TrainingSample:
    """A chain of sampled nodes: (version, weight of each token, tokens)."""
    nodes = tuple(
        Node(index - 1, (1,) * count, True, (-1.0,) * count, policy_version=version)
        for index, (version, _, count) in enumerate(parts)
    )
    weights = tuple((weight,) * count for _, weight, count in parts)
    return TrainingSample(TokenTree(nodes), advantages=weights, weights=weights)


def test_staleness_counts_updates_token_by_token():
    assert staleness([sample((3, 0.1, 2), (5, 0.1, 1)), sample((5, 0.1, 1))], lambda adapter: 5) == {
        "staleness": 1.0,
        "staleness_max": 2.0,
    }


def test_tokens_that_are_not_trained_or_of_unknown_weights_have_no_age():
    assert staleness([sample((1, 0.0, 2), (None, 0.1, 4), (4, 0.1, 1))], lambda adapter: 5)["staleness"] == 1.0
    assert staleness([sample((None, 0.1, 4))], lambda adapter: 5) == {}
    assert staleness([], lambda adapter: 5) == {}


class Recorded:
    """A policy that records what happens to it, and when calls are held back."""

    policy_version = 0

    def __init__(self) -> None:
        self.events: list[str] = []

    @asynccontextmanager
    async def updating(self):
        self.events.append("calls wait")
        yield True
        self.events.append("calls go on")

    async def train(self, samples: Any, options: UpdateOptions, *, in_flight: bool = False) -> dict[str, float]:
        self.events.append(f"train {in_flight}")
        return {"loss": 1.0}

    async def load(self, directory: Path, *, in_flight: bool = False) -> None:
        self.events.append(f"load {directory}")


class Separate(Recorded):
    capabilities = Capabilities(separate=True)

    async def train_apart(self, samples: Any, options: UpdateOptions) -> dict[str, float]:
        self.events.append("train apart")
        return {"loss": 1.0}

    async def publish_update(self, *, in_flight: bool = False) -> dict[str, float]:
        self.events.append(f"publish {in_flight}")
        return {"server_difference": 0.5}


@pytest.mark.parametrize(
    ("policy", "events", "metrics"),
    [
        (Recorded(), ["calls wait", "train True", "calls go on"], {"loss"}),
        (Separate(), ["train apart", "calls wait", "publish True", "calls go on"], {"loss", "server_difference"}),
    ],
)
async def test_calls_wait_only_while_the_weights_that_answer_them_change(
    policy: Any, events: list[str], metrics: set[str]
):
    found = await Learner(policy, policy.updating, token_budget=7).update([])
    assert policy.events == events
    assert found.keys() == metrics | {"drain_seconds"}


def test_loading_a_checkpoint_does_not_age_what_its_weights_sampled():
    """It raises the version of the weights, and is no update."""
    tree = TokenTree((Node(-1, (5,)), Node(0, (7,), True, (-0.1,), "r", "c", policy_version=3)))
    sample = TrainingSample(tree, advantages=((), (1.0,)), weights=((), (1.0,)))
    assert staleness([sample], lambda adapter: 8)["staleness"] == 5
    assert staleness([sample], lambda adapter: 8, resumes=[[3, 7]])["staleness"] == 1


async def test_weights_that_a_run_returns_to_are_published_as_updated_ones_are():
    policy = Recorded()

    class Publisher:
        async def publish(self) -> dict[str, float]:
            policy.events.append("publish")
            return {"publish_seconds": 0.1}

    learner = Learner(policy, policy.updating, token_budget=7, publish_weights=Publisher().publish)  # type: ignore[arg-type]
    await learner.rollback(Path("step-3"))
    assert policy.events == ["calls wait", "load step-3", "calls go on", "publish"]
    assert (await learner.update([]))["publish_seconds"] == 0.1
