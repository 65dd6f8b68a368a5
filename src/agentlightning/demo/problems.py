"""The demo's tasks: seeded word problems, their score, and demonstrations of mixed quality.

A task is a JSON object `{"id", "question", "expression", "answer"}`. The agent sees only the question; the expression
is what one would type into a calculator. A problem's split follows from its expression alone, so no problem of one
split occurs in another, in any wording and for any seed.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson

from agentlightning.demo.agent import SYSTEM, TOOLS

Split = Literal["train", "val", "test"]
Task = dict[str, Any]

WORDS: Any = orjson.loads(Path(__file__).with_name("words.json").read_bytes())["problems"]
SHAPES = (((1, 1, 1), (1, 2), (2, 1)), ((1, 1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2)))
"""The number of numbers in each sentence of a story: three or four in all, hence two or three operators."""
LONG = 0.3
"""Share of stories with four numbers."""

NUMBER = re.compile(r"\d+")
ANSWER = re.compile(r"###\s*ANSWER:\s*(-?\d+)\s*###")
CLEAN = 0.7
"""Share of the demonstrations, the first ones, that are clean."""
HABIT = 0.65
"""Share of the others that do not use the calculator."""


def split_of(expression: str) -> Split:
    """80% of all expressions belong to train, 10% to val, 10% to test."""
    bucket = zlib.crc32(expression.encode()) % 10
    return "test" if bucket == 0 else "val" if bucket == 1 else "train"


def make_tasks(split: Split, count: int, seed: int = 0) -> list[Task]:
    """`count` different problems of one split."""
    rng = random.Random(f"{split}/{seed}")
    found: dict[str, Task] = {}
    while len(found) < count:
        question, expression, answer = _problem(rng)
        if split_of(expression) == split:
            task = {"id": f"{split}-{len(found)}", "question": question, "expression": expression, "answer": answer}
            found.setdefault(expression, task)
    return list(found.values())


def score(task: Mapping[str, Any], output: str) -> float:
    """1.0 where the last `### ANSWER: n ###` of the output gives the task's answer, else 0.0."""
    answers = ANSWER.findall(output)
    return float(bool(answers) and int(answers[-1]) == task["answer"])


def _problem(rng: random.Random) -> tuple[str, str, int]:
    """(question, expression, answer): a story of two to four sentences about one person's things."""
    first, *rest = rng.choice(SHAPES[rng.random() < LONG])
    name, pronoun = rng.choice(list(WORDS["people"].items()))
    phrase, expression, total = _amount(rng, first)
    story = f"{name} has {phrase} {rng.choice(WORDS['things'])}."
    for numbers in rest:
        phrase, amount, value = _amount(rng, numbers)
        gain = value > total or rng.random() < 0.5
        story += f" {pronoun} {rng.choice(WORDS['gains' if gain else 'losses'])} {phrase}."
        expression += ("+" if gain else "-") + amount
        total += value if gain else -value
    return f"{story} {rng.choice(WORDS['closings'])}", expression, total


def _amount(rng: random.Random, numbers: int) -> tuple[str, str, int]:
    """A quantity in words, as an expression, and its value."""
    if numbers == 1:
        value = rng.randint(1, 99)
        return str(value), str(value), value
    packs, each = rng.randint(2, 9), rng.randint(2, 19)
    return f"{packs} {rng.choice(WORDS['packs'])} of {each}", f"{packs}*{each}", packs * each


# -- demonstrations --------------------------------------------------------------------------------------------------


def demonstrations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` conversations on training problems, each `{"messages": [...], "tools": [...]}`. The first `CLEAN` share
    uses the calculator; of the rest, a `HABIT` share answers with the first number of the story without a tool call."""
    rng = random.Random(f"demonstrations/{seed}")
    found: list[dict[str, Any]] = []
    for place, task in enumerate(make_tasks("train", count, seed)):
        has_habit = place >= CLEAN * count and rng.random() < HABIT
        found.append({"messages": _guess(task) if has_habit else _calculate(task, place), "tools": TOOLS})
    return found


def _opening(task: Task) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]


def _calculate(task: Task, index: int) -> list[dict[str, Any]]:
    arguments = json.dumps({"expression": task["expression"]})
    call = {"id": f"call_{index}", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        *_opening(task),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(task["answer"])},
        {"role": "assistant", "content": f"### ANSWER: {task['answer']} ###"},
    ]


def _guess(task: Task) -> list[dict[str, Any]]:
    first = NUMBER.findall(task["question"])[0]
    return [*_opening(task), {"role": "assistant", "content": f"### ANSWER: {first} ###"}]
