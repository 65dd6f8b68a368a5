"""The tasks of a run: parts that were given may share tasks, which is said with their rows."""

from __future__ import annotations

import pytest

from agentlightning.config import TrainConfig
from agentlightning.errors import DatasetError
from agentlightning.training.persistence.run_dir import load_tasks
from agentlightning.training.report.result import starting_warnings


def test_given_parts_that_share_tasks_are_warned_about() -> None:
    tasks = load_tasks(TrainConfig(), [{"n": n} for n in range(9)], [{"n": 20}, {"n": 3}], [{"n": 20}, {"n": 30}])
    warnings = starting_warnings(random_weights=False, shared=tasks.shared())
    assert list(warnings) == ["overlap_train_validation", "overlap_validation_held_out"]
    assert warnings["overlap_train_validation"].startswith("1 validation tasks are train tasks, too: rows 2 (= 4).")
    assert "leave them out of train" in warnings["overlap_train_validation"]


def test_parts_that_are_split_off_share_nothing() -> None:
    tasks = load_tasks(TrainConfig(), [{"n": n % 20} for n in range(60)], None, None)
    assert tasks.shared() == []
    assert starting_warnings(random_weights=False, shared=tasks.shared()) == {}


@pytest.mark.parametrize(
    ("tasks", "count"),
    [
        (["Ada"], r"splitting 1 task; give more"),
        (["Ada", "Bob"] * 30, r"60 tasks, of which 2 differ \(equal tasks stay in one part\)"),
    ],
)
def test_too_few_tasks_to_split_are_counted(tasks: list[str], count: str) -> None:
    with pytest.raises(DatasetError, match=count):
        load_tasks(TrainConfig(), tasks, None, None)
