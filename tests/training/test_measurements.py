"""The evaluations of a run: when it validates, which weights are the best, and what is measured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.config import EvaluationConfig
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.training import run as training_run
from agentlightning.training.persistence.run_dir import RunState, Tasks
from agentlightning.training.run import TrainingRun


class Publisher:
    async def write(self, name: str, sampling: dict[str, float]) -> str:
        return f"{name} at {sampling['temperature']}"


class Measured:
    """Measurements whose evaluations are given, and are recorded instead of run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.result = Evaluation((1.0, None), reasons={"failed": 1})
        self.requests: list[dict[str, Any]] = []
        self.progress: list[int] = []
        self.writes = 0
        self.state = RunState(run_id="r", revision=1)
        tasks = Tasks(train=[], validation=["v1", "v2", "v3"], held_out=["h1", "h2"])
        parts: dict[str, Any] = {
            "config": SimpleNamespace(evaluation=EvaluationConfig(**config)),
            "algorithm": SimpleNamespace(),
            "run_dir": SimpleNamespace(write_state=self._write),
            "collector": "collector",
            "source": None,
            "checkpoints": SimpleNamespace(publisher=Publisher()),
            "progress": SimpleNamespace(update=self.progress.append, phase=lambda *_: None),
        }
        self.run = TrainingRun(state=self.state, tasks=tasks, total_steps=9, **parts)

        async def evaluate_tasks(collector: Any, tasks: Sequence[Any], **options: Any) -> Evaluation:
            self.requests.append({"collector": collector, "tasks": tasks, **options})
            on_progress: Callable[[int], None] | None = options["on_progress"]
            if on_progress is not None:
                on_progress(len(tasks))
            return self.result

        monkeypatch.setattr(training_run, "evaluate_tasks", evaluate_tasks)

    def _write(self, state: RunState) -> None:
        self.writes += 1

    @property
    def names(self) -> list[str]:
        return [request["name"] for request in self.requests]


def is_best(measured: Measured, *rewards: float | None) -> bool:
    return measured.run.is_best({"greedy": Evaluation(rewards)})


def test_validation_is_due_every_so_many_steps_and_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def due(measured: Measured, total: int) -> list[int]:
        found: list[int] = []
        for step in range(1, total + 1):
            measured.state.step, measured.run.total_steps = step, total
            if measured.run.validation_is_due():
                found.append(step)
        return found

    assert due(Measured(monkeypatch, every=2), 5) == [2, 4, 5]
    assert due(Measured(monkeypatch, every=1), 2) == [1, 2]
    assert due(Measured(monkeypatch, every=0), 5) == []
    without = Measured(monkeypatch, every=1)
    without.run.tasks = Tasks(train=[], validation=[], held_out=[])
    assert due(without, 3) == []


def test_later_weights_that_are_as_good_are_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    measured.state.evaluations["before-greedy"] = [0.0]
    assert is_best(measured, 0.5, 0.5)
    assert measured.state.best_score == 0.5
    assert not is_best(measured, 0.5, 0.25)
    assert measured.state.evaluations == {"before-greedy": [0.0], "best-greedy": [0.5, 0.5]}
    assert is_best(measured, 0.25, 0.75)
    assert measured.state.evaluations == {"before-greedy": [0.0], "best-greedy": [0.25, 0.75]}


def test_a_missing_reward_counts_as_the_lowest_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    assert not is_best(measured, None, None)
    assert measured.state.best_score is None
    assert is_best(measured, 2.0, None)
    assert not is_best(measured, 0.5, 1.0), "against 2 and 0"
    assert is_best(measured, -4.0, 4.0), "against 2 and -4"


def test_all_modes_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch).run
    assert measured.is_best({"greedy": Evaluation((1.0,)), "sampled": Evaluation((0.0,))})
    assert not measured.is_best({"greedy": Evaluation((0.9,)), "sampled": Evaluation((0.0,))})
    assert measured.is_best({"greedy": Evaluation((0.5,)), "sampled": Evaluation((0.75,))})
    assert measured.state.best_score == 0.625


def test_a_run_that_knows_its_best_score_alone_is_compared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    measured.state.best_score = 0.75
    assert not is_best(measured, 0.5)
    assert is_best(measured, 0.75)


async def test_validation_is_named_by_its_step_and_takes_the_first_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch, tasks=2)
    measured.state.step = 7
    results = await measured.run.validate()
    assert results == {"greedy": measured.result, "sampled": measured.result}
    assert measured.requests[0] == {
        "collector": "collector",
        "tasks": ["v1", "v2"],
        "name": "r-validation-000007-greedy-changed1",
        "resources_id": "r-validation-000007-greedy-changed1 at 0.0",
        "mode": "val",
        "strict": False,
        "scores": None,
        "on_progress": None,
        "on_collected": measured.run.name_evaluated,
    }
    assert measured.requests[1]["resources_id"].endswith("-sampled-changed1 at 1.0")


async def test_the_start_is_measured_once_and_must_have_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    start = partial(measured.run.measure_held_out, "measuring the starting policy", "before", "before")
    first = await start()
    assert measured.names == ["r-before-greedy-changed1", "r-before-sampled-changed1"]
    assert [each["strict"] for each in measured.requests] == [True] * 2
    assert {(request["mode"], *request["tasks"]) for request in measured.requests} == {("test", "h1", "h2")}
    assert (measured.progress, measured.writes) == ([2, 4], 2)
    assert list(measured.state.evaluations) == ["before-greedy", "before-sampled"]
    again = await start()
    assert len(measured.requests) == 2
    for results in (first, again):
        assert [(each.rewards, each.reasons) for each in results.values()] == [((1.0, None), {"failed": 1})] * 2


async def test_the_trained_weights_are_measured_again_where_a_run_has_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured(monkeypatch, modes=("greedy",), held_out_tasks=1)
    measured.state.step = 4
    await measured.run.measure_trained()
    await measured.run.measure_trained()
    assert measured.names == ["r-after-000004-greedy-changed1"]
    assert (measured.state.measured_step, measured.requests[0]["tasks"]) == (4, ["h1"])
    assert measured.requests[0]["strict"] is False
    measured.state.step, measured.state.best_step = 9, 6
    measured.result = Evaluation((0.5,))
    found = await measured.run.measure_trained()
    assert measured.names[1:] == ["r-after-000006-greedy-changed1"], "the best weights, and not the last"
    assert found["greedy"].rewards == (0.5,)
    assert (found["greedy"].reasons, measured.state.measured_step) == ({}, 6)
