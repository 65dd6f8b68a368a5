"""The tasks of a run: loaded, split into disjoint parts, and stored in the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.config import TrainConfig
from agentlightning.errors import ConfigError, DatasetError, ResumeError
from agentlightning.task import Overlap, load_dataset, overlaps, split, task_key
from agentlightning.training.persistence.run_dir import RunDir, write_atomically
from agentlightning.util.json_values import dumps, loads

PARTS: Final = ("train", "validation", "held_out")


@dataclass(slots=True)
class Tasks:
    """The tasks of a run. Parts that are split off share none."""

    train: list[Any]
    validation: list[Any] = field(default_factory=list[Any])
    """To choose the best checkpoint by."""
    held_out: list[Any] = field(default_factory=list[Any])
    """To measure the gain on."""

    def shared(self) -> list[Overlap]:
        """The tasks that are in several parts, which only parts that were given can have in common."""
        return overlaps({"train": self.train, "validation": self.validation, "held_out": self.held_out})


def load_tasks(
    config: TrainConfig,
    train: Sequence[Any] | None,
    validation: Sequence[Any] | None,
    held_out: Sequence[Any] | None,
) -> Tasks:
    """The given tasks, or those that the configuration names. Missing parts are split off the training tasks."""
    data = config.data
    given = train if train is not None else data.train
    if given is None:
        raise ConfigError("no tasks: pass train_dataset to fit(), or set data.train (--dataset FILE)")
    tasks = Tasks(load_dataset(given))
    for part, value in (("validation", validation or data.validation), ("held_out", held_out or data.held_out)):
        if value is not None:
            setattr(tasks, part, load_dataset(value))
    return _split_off(tasks, config)


def _split_off(tasks: Tasks, config: TrainConfig) -> Tasks:
    shares = {
        "validation": 0.0 if tasks.validation else config.data.validation_share,
        "held_out": 0.0 if tasks.held_out else config.data.held_out_share,
    }
    given = tasks.train
    if any(shares.values()):
        rest = 1.0 - sum(shares.values())
        parts = split(tasks.train, [rest, *shares.values()], config.run.seed)
        tasks.train = parts[0]
        tasks.validation = tasks.validation or parts[1]
        tasks.held_out = tasks.held_out or parts[2]
    for part in ("train", "held_out"):
        if not getattr(tasks, part):
            raise DatasetError(
                f"no {part} task is left after splitting {_counted(given)}; give more tasks, a file of its own"
                f" (data.{part}), or other shares (data.validation_share, data.held_out_share)"
            )
    return tasks


def _counted(tasks: Sequence[Any]) -> str:
    different = len({task_key(task) for task in tasks})
    same = "" if different == len(tasks) else f", of which {different} differ (equal tasks stay in one part)"
    return f"{len(tasks)} task{'' if len(tasks) == 1 else 's'}{same}"


def check_disjoint(tasks: Tasks) -> None:
    """Raises DatasetError, which names rows, for a task that is in two splits: a result that was chosen or learned on
    it proves nothing there."""
    seen: dict[str, tuple[str, int]] = {}
    shared: list[str] = []
    for part in PARTS:
        own: dict[str, int] = {}
        for row, task in enumerate(getattr(tasks, part), 1):
            key = task_key(task)
            if key in seen:
                shared.append(f"{part} row {row} is {seen[key][0]} row {seen[key][1]}")
            own.setdefault(key, row)
        seen |= {key: (part, row) for key, row in own.items() if key not in seen}
    if shared:
        named = "; ".join(shared[:5]) + ("; ..." if len(shared) > 5 else "")
        raise DatasetError(
            f"{len(shared)} tasks are in two splits ({named}), so that a result could be chosen on what it is tested"
            " with; give each task to one split"
        )


def write_tasks(run_dir: RunDir, tasks: Tasks) -> None:
    """Store the tasks in the run directory."""
    run_dir.data("train").parent.mkdir(exist_ok=True)
    for part in PARTS:
        lines = b"".join(dumps(task) + b"\n" for task in getattr(tasks, part))
        write_atomically(run_dir.data(part), lines)


def read_tasks(run_dir: RunDir) -> Tasks:
    """The tasks that a run was started with. Raises ResumeError where they cannot be read."""
    try:
        parts = {part: [loads(line) for line in run_dir.data(part).read_bytes().splitlines()] for part in PARTS}
    except (OSError, ValueError) as error:
        raise ResumeError(f"the tasks of {run_dir.path} cannot be read: {error}; start a new run") from error
    return Tasks(**parts)
