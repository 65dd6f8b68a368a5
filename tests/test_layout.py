"""Promises of CONTRIBUTING.md about the layout of the package."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "agentlightning"
MOST_LINES_OF_A_FUNCTION = 100
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def test_no_two_files_import_each_other_not_even_for_types() -> None:
    plugins = [path.name for path in (ROOT / "plugins").glob("*/src/*")]
    graph = grimp.build_graph("agentlightning", *plugins, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(f"circle of files: {' -> '.join(error.args[1])}") from None


def test_every_package_is_in_the_tree_and_nothing_else() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text[text.index("```\nagentlightning/") : text.index("```\n\nEach package")]
    names = re.findall(r"^  ([a-z_./ ]+?)(?:  |$)", tree, re.MULTILINE)
    listed = {name.rstrip("/") for names_of_line in names for name in names_of_line.split()}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= listed, packages - listed
    assert not [name for name in listed if not list(PACKAGE.rglob(name))]


def test_every_package_says_what_it_is_for() -> None:
    silent = [path for path in PACKAGE.rglob("__init__.py") if not path.read_text().startswith('"""')]
    assert not silent


def test_the_source_only_shrinks() -> None:
    """Tokens cannot be saved by joining lines, so they are what is counted, part by part."""
    parts = tomllib.loads((ROOT / "tests" / "source_budget.toml").read_text())
    part_of = {name: part for part, figures in parts.items() for name in figures["modules"].split()}
    tokens: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        tokens[part_of.get(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), "face")] += _tokens(path)
    tokens["face"] += sum(_tokens(path) for path in (ROOT / "plugins").glob("*/src/**/*.py"))
    budget = {part: figures["tokens"] for part, figures in parts.items()}
    grown = {part: f"{tokens[part]} of {limit}" for part, limit in budget.items() if tokens[part] > limit}
    assert not grown, f"too many tokens, so take as many out of the same part: {grown}"
    stale = {part: tokens[part] for part, limit in budget.items() if tokens[part] < limit * 0.98}
    assert not stale, f"the source has shrunk, so lower the figures in tests/source_budget.toml: {stale}"


def test_functions_stay_under_a_hundred_lines() -> None:
    long: dict[str, int] = {}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long[f"{path.relative_to(ROOT)}: {node.name}"] = lines
    assert not long


def _tokens(path: Path) -> int:
    """How many tokens a file has without comments and docstrings."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in NOT_CODE and token.start[0] not in docstrings for token in tokens)
