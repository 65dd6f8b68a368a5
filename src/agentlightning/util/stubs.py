"""Where the names of a package are that it loads when they are used: its stub says so, which editors read, too."""

from __future__ import annotations

from pathlib import Path


def stub_names(init_file: str) -> dict[str, str]:
    """Name -> the module that the stub beside an `__init__.py` imports it from, in lines such as
    `from package.module import Name as Name`."""
    lines = Path(init_file).with_suffix(".pyi").read_text("utf-8").splitlines()
    imports = [line.split() for line in lines if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in imports}
