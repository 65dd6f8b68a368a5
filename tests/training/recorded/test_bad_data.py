"""What every algorithm that learns from a store says to one that it cannot learn from: before anything is trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import DatasetError

ALGORITHMS = {"rl": agl.LightningRL, "dpo": agl.DPO, "rejection": agl.RejectionSampling, "sft": agl.SFTAlgorithm}


@pytest.fixture(params=[*ALGORITHMS, "query"])
def refused(request: pytest.FixtureRequest, store: Any, tiny: Path, tmp_path: Path) -> Any:
    """Trains, which must end with a DatasetError of this text and leave nothing behind."""

    def check(text: str, **settings: Any) -> None:
        made: dict[str, Any] = dict(settings)
        if request.param == "query":
            algorithm: Any = agl.SFTAlgorithm(dataset=store.get_successful_trajectories(), **made)
        else:
            algorithm = ALGORITHMS[request.param](**made)
        with pytest.raises(DatasetError, match=text):
            agl.Trainer(store=store, algorithm=algorithm, model=tiny, run_dir=tmp_path / "run").train()
        assert not (tmp_path / "run").exists(), "a run that never began is left"

    return check


def test_an_empty_store_is_said(refused: Any) -> None:
    refused(r"no finished session to learn from; record some with agl\.track_session")


def test_sessions_without_rewards_are_said(refused: Any, store: Any, add: Any) -> None:
    asyncio.run(add(store, "question", "yes"))
    asyncio.run(add(store, "question", "no"))
    refused(r"reward.*agl\.emit_reward|missing reward")


def test_an_agent_that_nobody_used_is_answered_with_those_there_are(refused: Any, fill: Any, store: Any) -> None:
    fill(store, 1, agent="writer")
    refused(r"no call of 4 sessions is of an agent called 'editor'; there are 'writer'", target_agent="editor")
