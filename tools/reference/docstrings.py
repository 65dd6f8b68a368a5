"""What the source says of a name: its docstring as Markdown, and the docstrings below its attributes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

DOCTEST = re.compile(r"^(?:>>> |\.\.\. )")


def markdown(text: str) -> str:
    """A docstring as Markdown: examples become blocks of code, and indented text that is no list too."""
    return "\n\n".join(_paragraph(each) for each in re.split(r"\n\s*\n", textwrap.dedent(text).strip()) if each.strip())


def _paragraph(text: str) -> str:
    text = text.strip("\n")
    if DOCTEST.match(text.strip()):
        return f"```pycon\n{textwrap.dedent(text)}\n```"
    if text.startswith("    "):
        return f"```text\n{textwrap.dedent(text)}\n```"
    return text


def cell(text: str) -> str:
    """Text for a cell of a table: one line, bars escaped."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def code(text: str) -> str:
    """Code for a cell of a table; empty for no text."""
    return f"`{cell(text)}`" if text else ""


def module_constants(module: ModuleType) -> dict[str, tuple[object, str]]:
    """The annotated constants of a module, with their values and the text below them ("" for none), in order."""
    body = ast.parse(inspect.getsource(module)).body
    texts = dict(documented(body))
    names = [each.target.id for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return {name: (getattr(module, name), texts.get(name, "")) for name in names}


def documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Pairs of name and text, for each assignment that a string follows."""
    for statement, after in pairwise(body):
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield target.id, inspect.cleandoc(str(after.value.value))
