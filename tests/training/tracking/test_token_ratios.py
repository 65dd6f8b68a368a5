"""The ratios of an update are those of its own tokens, call by call, and survive a crash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.tracking import TokenRatios, ratios_file, read_ratios, write_ratios
from agentlightning.trajectory import Node, TokenTree, TrainingSample


class Scorer:
    """Weights that give every sampled token the same probability, by adapter."""

    def __init__(self, **probability: float) -> None:
        self.probability = probability

    async def score(self, trees: Sequence[TokenTree], what: Any, *, adapter: str | None = None) -> Any:
        assert what == {"logprobs"}
        value = math.log(self.probability[adapter or "policy"])
        return {
            "logprobs": [
                tuple(np.full(len(n.token_ids) * n.sampled, value, np.float32) for n in t.nodes) for t in trees
            ]
        }


def sample(rollout: str, *parts: tuple[float, ...], adapter: str | None = None) -> TrainingSample:
    """A rollout of one call, in as many nodes as it was split into."""
    nodes = [Node(-1, (1, 2))]
    for place, part in enumerate(parts):
        logprobs = tuple(math.log(each) for each in part)
        nodes.append(Node(place, tuple(range(len(part))), True, logprobs, rollout, "call"))
    ones = [(), *((1.0,) * len(part) for part in parts)]
    return TrainingSample(TokenTree(tuple(nodes)), advantages=ones, weights=ones, adapter=adapter)


async def test_the_ratio_is_new_to_old_and_a_call_that_was_split_is_whole(tmp_path: Path):
    samples = [sample("one", (0.5, 0.25), (1.0,)), sample("two", (0.5,), adapter="critic")]
    learner: Any = Scorer(policy=0.5, critic=0.25)
    run: Any = SimpleNamespace(directory=tmp_path, state=RunState("r", step=2), learner=learner)
    cost = await TokenRatios(run).on_update(samples)
    assert cost["ratio_seconds"] >= 0
    found = read_ratios(tmp_path, 3, ["one", "two"])
    assert [round(math.exp(each), 3) for each in found["one", "call"]] == [1.0, 2.0, 0.5]
    assert [round(math.exp(each), 3) for each in found["two", "call"]] == [0.5]


def test_only_the_rollouts_that_are_asked_for_are_read(tmp_path: Path):
    write_ratios(tmp_path, 1, {("one", "a"): [0.1], ("one-more", "b"): [0.2]})
    assert read_ratios(tmp_path, 1, ["one"]) == {("one", "a"): [0.1]}
    assert read_ratios(tmp_path, 2, ["one"]) == {}


def test_a_step_that_is_repeated_after_a_crash_counts_with_its_last_numbers(tmp_path: Path):
    write_ratios(tmp_path, 1, {("one", "a"): [0.1], ("two", "a"): [0.2]})
    path = ratios_file(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-6])
    write_ratios(tmp_path, 1, {("one", "a"): [0.3]})
    assert read_ratios(tmp_path, 1, ["one", "two"]) == {("one", "a"): [0.3]}
