"""What the reflective search remembers of lines: the failures that each added line turned.

So a child that loses a line is tried on just these tasks, and a line is taken back if they stay turned without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithms.apo.text.candidate import Candidate

Line = tuple[str, str]
"""Name of the resource, text."""


@dataclass(slots=True)
class LineCredits:
    """The credits of lines."""

    tasks: dict[Line, list[int]] = field(default_factory=dict[Line, list[int]])
    """Added line -> the tasks whose failures it turned."""
    examined: set[Line] = field(default_factory=set[Line])
    """Lines that were found to be needed since the last change of the favourite."""

    def credit(self, parent: Candidate, child: Candidate, tasks: Iterable[int]) -> None:
        """Credit the lines that a child adds with the failures it turned."""
        for line in added_lines(parent, child):
            self.tasks[line] = sorted({*self.tasks.get(line, ()), *tasks})

    def endangered(self, parent: Candidate, child: Candidate) -> list[int]:
        """The tasks that lines turned which a child no longer has."""
        return sorted({task for line in added_lines(child, parent) for task in self.tasks.get(line, ())})

    def state_dict(self) -> dict[str, Any]:
        return {
            "credits": [[*line, tasks] for line, tasks in self.tasks.items()],
            "examined": [list(line) for line in self.examined],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tasks = {(name, text): list(tasks) for name, text, tasks in state["credits"]}
        self.examined = {(name, text) for name, text in state["examined"]}


def lines_of(candidate: Candidate) -> list[Line]:
    return [(name, line) for name, text in candidate.texts.items() for line in text.splitlines()]


def added_lines(before: Candidate, after: Candidate) -> list[Line]:
    known = set(lines_of(before))
    return [line for line in lines_of(after) if line not in known and line[1].strip()]


def without_line(candidate: Candidate, line: Line) -> Candidate:
    """The candidate without one line."""
    name, text = line
    lines = candidate.texts[name].splitlines()
    lines.remove(text)
    return candidate.changed(**{name: "\n".join(lines)})
