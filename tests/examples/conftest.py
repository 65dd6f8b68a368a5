"""Imports the modules of an example as its programs do: with its folder on the path, and only while a test runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """example("spider/reward") is examples/spider/reward.py as a module."""
    before = {*sys.modules}

    def load(name: str) -> ModuleType:
        path = EXAMPLES / f"{name}.py"
        monkeypatch.syspath_prepend(str(path.parent))
        return importlib.import_module(path.stem)

    yield load
    for name in {*sys.modules} - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and EXAMPLES in Path(file).parents:
            del sys.modules[name]
