"""What credit rules remember of tasks from one batch to the next: bounded, and plain enough for JSON.

A rule keeps a table for each task: a list of numbers for each key, such as the moving mean of the return through a
state. A run keeps one memory, writes it in its checkpoints and restores it when it resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import ResumeError
from agentlightning.task import task_key
from agentlightning.trajectory import Trajectory

MemoryTable = dict[str, list[float]]
"""Numbers by key."""


@dataclass(slots=True)
class CreditMemory:
    """Tables of numbers by task, the task that was written last at the end. Where it holds more than `limit` keys, the
    tasks that were not written for longest are forgotten.

    >>> memory = CreditMemory(limit=2)
    >>> for task in ("a", "b", "c"):
    ...     memory.write(task, {"state": [0.5, 8.0]})
    >>> memory.read("a"), memory.read("c"), memory.forgotten
    ({}, {'state': [0.5, 8.0]}, 1)
    """

    limit: int = 200_000
    """Keys of all tasks together."""
    forgotten: int = 0
    """Tasks that were dropped because of the limit."""
    _tables: dict[str, MemoryTable] = field(default_factory=dict[str, MemoryTable])
    _size: int = 0

    @property
    def size(self) -> int:
        """The number of keys of all tasks."""
        return self._size

    def read(self, task: str) -> Mapping[str, Sequence[float]]:
        """The table of a task; empty if there is none."""
        return self._tables.get(task, {})

    def write(self, task: str, table: Mapping[str, Sequence[float]]) -> None:
        """Replace the table of a task."""
        self._size += len(table) - len(self._tables.pop(task, {}))
        self._tables[task] = {key: list(numbers) for key, numbers in table.items()}
        while self._size > self.limit and len(self._tables) > 1:
            oldest = next(iter(self._tables))
            self._size -= len(self._tables.pop(oldest))
            self.forgotten += 1

    def state_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {"forgotten": self.forgotten, "tables": self._tables}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all of it. Raises ResumeError for what `state_dict` cannot have written."""
        try:
            tables: dict[str, MemoryTable] = {
                str(task): {str(key): [float(number) for number in numbers] for key, numbers in table.items()}
                for task, table in state["tables"].items()
            }
            forgotten = int(state["forgotten"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"the memory of the credit rule cannot be read: {error!r}; start a new run") from error
        self._tables, self.forgotten = {}, forgotten
        self._size = 0
        for task, table in tables.items():
            self.write(task, table)


def memory_key(group: Sequence[Trajectory]) -> str:
    """The same for every group of one task: a digest of the task, or the group's name where the task is not known."""
    if not group:
        return ""
    return group[0].group if group[0].task is None else task_key(group[0].task)
