"""Where the names of a package are that it loads when they are used: its stub says so, which editors read, too."""

from __future__ import annotations

from pkgutil import get_data


def stub_names(package: str) -> dict[str, str]:
    """Name -> the module that the stub of a package, which may lie in an archive, imports it from, in lines such as
    `from package.module import Name as Name`."""
    lines = (get_data(package, "__init__.pyi") or b"").decode().splitlines()
    imports = [line.split() for line in lines if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in imports}
