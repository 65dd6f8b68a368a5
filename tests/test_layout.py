"""Promises of CONTRIBUTING.md about the layout of the package."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "agentlightning"
MOST_FILES = 15
MOST_LINES = 500


def test_no_two_files_import_each_other_not_even_for_types() -> None:
    graph = grimp.build_graph("agentlightning", cache_dir=None)
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


def test_folders_and_files_stay_small() -> None:
    folders = [PACKAGE, *(path.parent for path in PACKAGE.rglob("*/__init__.py"))]
    assert not {str(f): n for f in folders if (n := len(list(f.glob("*.py")))) > MOST_FILES}
    assert not {str(p): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > MOST_LINES}
