"""Generated word problems as records of Calc-X, and demonstrations of mixed quality.

The stories are those of `agl demo`: a person, things, and two to four numbers. No two splits share a problem.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from calcx import demonstration

from agentlightning.demo.problems import make_tasks

FIRST_NUMBER = re.compile(r"\d+")


def problems(split: Literal["train", "val", "test"], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` different problems of a split."""
    return [_problem(task) for task in make_tasks(split, count, seed)]


def demonstrations(
    count: int, seed: int, opening: Sequence[dict[str, Any]], tools: Sequence[Any], *, clean: float, habit: float
) -> list[dict[str, Any]]:
    """`count` conversations on training problems. The first `clean` share calculates; of the rest, a `habit` share
    answers with the first number of the story."""
    rng = random.Random(f"demonstrations/{seed}")
    found = problems("train", count, seed)
    for number, problem in enumerate(found):
        if number >= clean * count and rng.random() < habit:
            found[number] = problem | {"chain": "", "result": FIRST_NUMBER.findall(problem["question"])[0]}
    return [demonstration(problem, opening, tools) for problem in found]


def _problem(task: dict[str, Any]) -> dict[str, Any]:
    value = str(task["answer"])
    chain = f'<gadget id="calculator">{task["expression"]}</gadget>\n<output>{value}</output>\n<result>{value}</result>'
    return {
        "id": task["id"],
        "question": task["question"],
        "chain": chain,
        "result": value,
        "result_float": float(value),
    }
