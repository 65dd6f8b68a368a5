"""Reads word problems in the format of Calc-X (Kadlcik et al. 2023, arXiv 2305.15017), from JSONL or Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

import agentlightning as agl
from agentlightning.task import load_dataset

STEP = re.compile(r'<gadget id="calculator">(.*?)</gadget>\s*<output>(.*?)</output>', re.DOTALL)


class Problem(BaseModel):
    """One record of calc-gsm8k, calc-svamp and their kin; further fields are left alone."""

    id: str
    question: str = Field(min_length=1)
    chain: str
    """The solution, with `<gadget id="calculator">48 / 2</gadget><output>24</output>` where it calculates."""
    result: str = Field(min_length=1)
    result_float: float | None = None


def read_problems(path: Path | str) -> list[dict[str, Any]]:
    """The problems of a .jsonl or .parquet file. Raises DatasetError with the line or row and the field of what is not
    in the format."""
    path = Path(path)
    if not path.is_file():
        raise agl.errors.DatasetError(f"there is no file {path}; Calc-X is at https://huggingface.co/MU-NLPC")
    return [_problem(place, record).model_dump() for place, record in _records(path)]


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it is, the record)."""
    if path.suffix == ".parquet":
        yield from ((f"{path}, row {row}", record) for row, record in enumerate(load_dataset(path), 1))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise agl.errors.DatasetError(f"{path}:{number}: not JSON: {error}") from error


def _problem(place: str, record: Any) -> Problem:
    try:
        return Problem.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        raise agl.errors.DatasetError(
            f"{place}: {'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"
        ) from error


def steps(chain: str) -> list[tuple[str, str]]:
    """(expression, value) of each calculation of a chain."""
    return [(unescape(each).strip(), unescape(value).strip()) for each, value in STEP.findall(chain)]


def demonstration(problem: dict[str, Any], opening: Sequence[dict[str, Any]], tools: Sequence[Any]) -> dict[str, Any]:
    """A conversation that follows the chain of a problem: a call for each calculation, and the result."""
    turns: list[dict[str, Any]] = []
    for expression, value in steps(problem["chain"]):
        call = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
        turns.append({"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": call}]})
        turns.append({"role": "tool", "tool_call_id": "call_0", "content": value})
    last = {"role": "assistant", "content": f"### ANSWER: {problem['result']} ###"}
    user = {"role": "user", "content": problem["question"]}
    return {"messages": [*opening, user, *turns, last], "tools": list(tools)}
