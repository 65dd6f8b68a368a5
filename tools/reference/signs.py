"""The page of the signs of trouble that a run warns of, from `training/health/signs.py`: texts and limits."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from agentlightning.training.health import signs
from tools.reference.docstrings import cell, module_constants
from tools.reference.python_names import MADE

START = f"""# Warnings

{MADE}
Every sign of trouble that [the health of a run](health.md) knows: what it says, with "…" for numbers, and what to try.
Most are judged over the last {signs.WINDOW} steps.

| sign | says | try |
| --- | --- | --- |
"""
BY_CAUSE = "depends on [why the groups have no spread](health.md#groups-without-spread)"
"""What to try where the code decides it."""


def page() -> str:
    """The whole page."""
    rows = [f"| `{name}` | {cell(what)} | {cell(advice)} |" for name, (what, advice) in sorted(texts().items())]
    limits = [
        f"| `{name}` | {value} | {cell(text)} |"
        for name, (value, text) in module_constants(signs).items()
        if isinstance(value, int | float) and text
    ]
    return START + "\n".join([*rows, "\n## Limits\n", "| constant | value | |", "| --- | --- | --- |", *limits])


def texts() -> dict[str, tuple[str, str]]:
    """Sign -> what it says, and what to try."""
    found = {
        name: (f"{_shown(what)} (from {limit:g} on)" if limit else _shown(what), advice)
        for name, _, limit, what, advice in (*signs.LIMITS, *signs.OF_LAST_STEP)
    }
    for function in ast.parse(inspect.getsource(signs)).body:
        if isinstance(function, ast.FunctionDef):
            for call in _calls(function):
                if isinstance(call.args[0], ast.Constant):
                    local = _assigned(function, call.lineno)
                    what, advice = (_text(each, local) for each in call.args[1:3])
                    found[str(call.args[0].value)] = (what, BY_CAUSE if advice == "…" else advice)
    return found


def _assigned(function: ast.FunctionDef, before: int) -> dict[str, ast.expr]:
    """The values that names have been given above a line."""
    return {
        each.targets[0].id: each.value
        for each in ast.walk(function)
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.lineno < before
    }


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    for each in ast.walk(function):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "Sign":
            yield each


def _shown(template: str) -> str:
    return "".join(part if not number % 2 else "…" for number, part in enumerate(_split(template)))


def _split(template: str) -> list[str]:
    return [part for piece in template.split("{") for part in piece.split("}", 1)]


def _text(node: ast.expr, local: dict[str, ast.expr]) -> str:
    """What an expression says, as far as it is written in the source."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each, local) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, local)
    if isinstance(node, ast.BinOp):
        return _text(node.left, local) + _text(node.right, local)
    if isinstance(node, ast.IfExp):
        return _text(node.body, local)
    if isinstance(node, ast.Name) and isinstance(value := getattr(signs, node.id, None), str):
        return value
    if isinstance(node, ast.Name) and isinstance(local.get(node.id), ast.JoinedStr | ast.BinOp | ast.IfExp):
        return _text(local[node.id], {})
    return "…"
