"""Checkpoints hold what an algorithm has learned beside the weights."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.config import RunConfig
from agentlightning.errors import ResumeError
from agentlightning.training.persistence.checkpoints import ALGORITHM_FILE, Checkpoints
from agentlightning.training.persistence.run_dir import RunDir, RunState


class Remembers:
    """An algorithm with something to remember."""

    def __init__(self, learned: Any) -> None:
        self.learned = learned

    def state_dict(self) -> Any:
        return self.learned

    def load_state_dict(self, state: Any) -> None:
        self.learned = state


class Publisher:
    """Has published nothing."""

    published = False

    @property
    def resources(self) -> dict[str, Any]:
        return {}

    def publish(self, resources: Any) -> None: ...


@pytest.fixture
def run_dir(tmp_path: Any) -> Any:
    opened = RunDir.create(tmp_path / "run")
    yield opened
    opened.close()


def checkpoints(run_dir: RunDir, algorithm: Any, revision: int = 0) -> Checkpoints:
    state = RunState(run_id="r", revision=revision)
    return Checkpoints(run_dir, state, RunConfig(), None, Publisher(), algorithm)  # type: ignore[arg-type]


async def test_what_an_algorithm_learned_comes_back_from_its_checkpoint(run_dir: RunDir) -> None:
    algorithm = Remembers({"seen": {"a": [1.5, 2.0]}})
    written = await checkpoints(run_dir, algorithm).write(3)
    algorithm.learned = {"seen": {"later": [0.0]}}
    resumed = Remembers({})
    checkpoints(run_dir, resumed).restore_algorithm(written)
    assert resumed.learned == {"seen": {"a": [1.5, 2.0]}}
    await checkpoints(run_dir, algorithm).rollback(written)
    assert algorithm.learned == {"seen": {"a": [1.5, 2.0]}}


async def test_nothing_is_restored_where_rewards_have_changed_their_meaning(run_dir: RunDir) -> None:
    written = await checkpoints(run_dir, Remembers({"seen": 1})).write(3)
    resumed = Remembers({})
    checkpoints(run_dir, resumed, revision=1).restore_algorithm(written)
    assert resumed.learned == {}


async def test_an_algorithm_without_a_state_writes_no_file(run_dir: RunDir) -> None:
    written = await checkpoints(run_dir, Remembers({})).write(3)
    assert not (run_dir.path / written / ALGORITHM_FILE).exists()
    kept = Remembers({"own": 1})
    checkpoints(run_dir, kept).restore_algorithm(written)
    checkpoints(run_dir, kept).restore_algorithm(None)
    assert kept.learned == {"own": 1}


@pytest.mark.parametrize("content", ["{", "[]", '{"revision": 0}'])
async def test_a_file_that_cannot_be_read_is_an_error_of_resuming(run_dir: RunDir, content: str) -> None:
    written = await checkpoints(run_dir, Remembers({"seen": 1})).write(3)
    (run_dir.path / written / ALGORITHM_FILE).write_text(content)
    with pytest.raises(ResumeError, match=ALGORITHM_FILE):
        checkpoints(run_dir, Remembers({})).restore_algorithm(written)
