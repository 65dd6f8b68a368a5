"""The demo's tasks: what is held out stays held out, and a score means what it says."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.demo.agent import SYSTEM, TOOLS, calculator
from agentlightning.demo.problems import demonstrations, make_tasks, score

seeds = st.integers(0, 2**32)


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


@given(seeds, seeds, seeds)
@settings(max_examples=25)
def test_no_problem_of_one_split_occurs_in_another_whatever_the_seeds(train: int, val: int, test: int) -> None:
    parts = [make_tasks("train", 200, train), make_tasks("val", 60, val), make_tasks("test", 60, test)]
    for field in ("question", "expression"):
        sets = [{task[field] for task in part} for part in parts]
        assert sets[0].isdisjoint(sets[1] | sets[2])
        assert sets[1].isdisjoint(sets[2])


@given(seeds)
@settings(max_examples=25)
def test_the_answer_is_what_the_calculator_makes_of_the_expression(seed: int) -> None:
    for task in make_tasks("train", 50, seed):
        assert calculator(json.dumps({"expression": task["expression"]})) == str(task["answer"])
        assert task["answer"] >= 0
        assert numbers(task["question"]) == numbers(task["expression"])
        assert len(numbers(task["expression"])) in (3, 4)


def test_tasks_follow_from_the_seed_and_do_not_repeat() -> None:
    tasks = make_tasks("train", 300, seed=7)
    assert tasks == make_tasks("train", 300, seed=7)
    assert tasks != make_tasks("train", 300, seed=8)
    assert len({task["expression"] for task in tasks}) == 300


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("### ANSWER: 42 ###", 1.0),
        ("So it is\n###ANSWER:42###", 1.0),
        ("### ANSWER: 41 ### no, ### ANSWER: 42 ###", 1.0),
        ("### ANSWER: 42 ### no, ### ANSWER: 41 ###", 0.0),
        ("### ANSWER: 420 ###", 0.0),
        ("### ANSWER: -42 ###", 0.0),
        ("42", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_marked_answer_counts(output: str, expected: float) -> None:
    assert score({"answer": 42}, output) == expected


def test_demonstrations_are_clean_first_and_show_a_bad_habit_later() -> None:
    course = demonstrations(400, seed=3)
    tasks = make_tasks("train", 400, seed=3)
    skips = [len(each["messages"]) == 3 for each in course]
    assert not any(skips[:280])
    assert 0.5 < sum(skips[280:]) / 120 < 0.8
    scores = [score(task, each["messages"][-1]["content"]) for task, each in zip(tasks, course, strict=True)]
    assert all(value == 1.0 for value, skipped in zip(scores, skips, strict=True) if not skipped)
    assert sum(value for value, skipped in zip(scores, skips, strict=True) if skipped) < 0.1 * sum(skips)


def test_a_clean_demonstration_is_what_the_agent_would_have_said_and_seen() -> None:
    task, demonstration = make_tasks("train", 1, seed=3)[0], demonstrations(1, seed=3)[0]
    system, user, asks, result, answers = demonstration["messages"]
    assert (system["content"], user["content"], demonstration["tools"]) == (SYSTEM, task["question"], TOOLS)
    assert result["content"] == calculator(asks["tool_calls"][0]["function"]["arguments"])
    assert result["tool_call_id"] == asks["tool_calls"][0]["id"]
    assert score(task, answers["content"]) == 1.0


def test_demonstrations_use_training_problems_only() -> None:
    held_out = {task["question"] for split in ("val", "test") for task in make_tasks(split, 500, seed=0)}
    assert held_out.isdisjoint(each["messages"][1]["content"] for each in demonstrations(1000, seed=0))
