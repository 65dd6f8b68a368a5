"""Examples as their users have them: a folder of modules, some of which need the packages of an agent framework."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """module_of(example, name) is a module in the folder of an example; examples have modules of the same name."""
    folders: list[Path] = []

    def load(example: str, name: str) -> ModuleType:
        folders.append(ROOT / "examples" / example)
        monkeypatch.syspath_prepend(str(folders[-1]))
        return importlib.import_module(name)

    yield load
    for name, module in list(sys.modules.items()):
        if (file := getattr(module, "__file__", None)) and Path(file).parent in folders:
            del sys.modules[name]


@pytest.fixture
def python_of() -> Callable[[str, str], Path]:
    """python_of(example, modules) is an interpreter that has them: that of `setup.sh`, or this one; else skips."""

    def find(example: str, modules: str) -> Path:
        made = ROOT / ".peers" / "examples" / example / "bin" / "python"
        for python in (made, Path(sys.executable)):
            if (
                python.exists()
                and not subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode
            ):
                return python
        pytest.skip(f"{modules} are not installed; run: tests/examples/setup.sh {example}")

    return find
