"""What rules remember is bounded and survives a file."""

from __future__ import annotations

import json

import pytest

from agentlightning.credit.base import CreditMemory, memory_key
from agentlightning.errors import ResumeError
from agentlightning.trajectory import Trajectory


def test_the_tasks_that_were_not_written_for_longest_are_forgotten() -> None:
    memory = CreditMemory(limit=4)
    for task in "abc":
        memory.write(task, {"x": [1.0], "y": [2.0]})
    assert (memory.read("a"), memory.size) == ({}, 4)
    memory.write("b", {"x": [3.0]})
    memory.write("d", {"x": [4.0]})
    assert (memory.read("b"), memory.read("c"), memory.size) == ({"x": [3.0]}, {"x": [1.0], "y": [2.0]}, 4)
    memory.write("e", {"x": [5.0]})
    assert (memory.read("c"), memory.read("b"), memory.size) == ({}, {"x": [3.0]}, 3)


def test_a_memory_goes_through_json_unchanged() -> None:
    memory = CreditMemory()
    memory.write("a", {"x": [0.1, 8.0]})
    memory.write("b", {})
    other = CreditMemory()
    other.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    assert other == memory


@pytest.mark.parametrize("state", [{}, {"tables": []}, {"tables": {"a": {"x": ["?"]}}}])
def test_a_memory_that_cannot_be_read_is_an_error_of_resuming(state: dict[str, object]) -> None:
    memory = CreditMemory()
    memory.write("a", {"x": [1.0]})
    with pytest.raises(ResumeError, match="memory of the credit rule cannot be read"):
        memory.load_state_dict(state)
    assert memory.read("a") == {"x": [1.0]}


def test_a_task_is_known_by_its_input_and_else_by_its_group() -> None:
    def group(task: object, name: str) -> list[Trajectory]:
        return [Trajectory("r", "at", (), 1.0, name, task=task)]

    assert memory_key(group({"a": 1, "b": 2}, "step-1")) == memory_key(group({"b": 2, "a": 1}, "step-2"))
    assert memory_key(group({"a": 1}, "g")) != memory_key(group({"a": 2}, "g"))
    assert memory_key(group(None, "g")) == "g"
    assert memory_key([]) == ""
