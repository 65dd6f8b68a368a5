"""`agl env`: what a report of a fault needs: versions, extras, extensions, the machine and its devices, paths."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from agentlightning.cli.opening import RUNS, database_name
from agentlightning.cli.output import Result
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.util.plugins import PACKAGE, Registry, announced, described, installed, load
from agentlightning.util.printable import printable


def env() -> Result:
    """Print what a report of a fault needs: versions, extras, extensions, the machine and its devices, paths.

    Of environment variables it prints names, and no values. Exit status 1: an extension cannot be used.

    \b
    Examples:
      agl env
      agl env --json
    """
    extensions = installed_extensions()
    record = {
        "versions": _versions(),
        "extras": _extras(),
        "machine": _machine(),
        "torch": _torch(),
        "paths": {
            "package": PACKAGE,
            "store": database_name(None),
            "runs": str(RUNS.absolute()),
            "directory": str(Path.cwd()),
        },
        "variables": sorted(name for name in os.environ if name.startswith(VARIABLES)),
        "extensions": extensions,
    }
    broken = any("problem" in each for each in extensions)
    return Result(record, lambda console: _print(record, console), status=broken)


VARIABLES = ("AGL_", "CUDA_", "HF_", "OMP_", "OPENAI_", "ANTHROPIC_", "PYTORCH_", "VLLM_")
"""How the names of environment variables begin that change what the program does."""


def _requirements() -> dict[str, set[str]]:
    """The packages that each extra installs; "" are those that are always there."""
    found = defaultdict[str, set[str]](set)
    for line in requires("agentlightning") or []:
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"]([\w-]+)", line)
        if name != "agentlightning":
            found[extra[1] if extra else ""].add(name)
    del found["dev"]
    return found


def _versions() -> dict[str, str]:
    """Of this package, of Python, and of what is installed of that which it can use."""
    packages = sorted({"vllm"}.union(*_requirements().values()))
    known = {name: found for name in packages if (found := _version(name)) is not None}
    return {"agentlightning": version("agentlightning"), "python": platform.python_version(), **known}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _extras() -> dict[str, str]:
    """What each extra lacks."""
    lacking = {
        extra: [name for name in sorted(packages) if _version(name) is None]
        for extra, packages in _requirements().items()
    }
    return {extra: f"(lacks {', '.join(each)})" if each else "" for extra, each in lacking.items() if extra}


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "free_disk_gb": round(shutil.disk_usage(".").free / 1e9, 1),
        "python": sys.executable,
    }


def _torch() -> dict[str, Any] | None:
    """Torch and its devices; None where it is not installed."""
    if find_spec("torch") is None:
        return None
    try:
        from agentlightning.policy.devices import torch_devices

        return torch_devices()
    except Exception as error:  # noqa: BLE001  a broken installation is what may be reported
        return {"problem": repr(error)}


def installed_extensions() -> list[dict[str, str]]:
    """What distributions announce, each with what it is or the problem with it."""
    from agentlightning.task import DATASETS
    from agentlightning.training.persistence.run_changes import SEAMS

    registries = {each.kind: each for each in (*SEAMS.values(), DATASETS)}
    found = list[dict[str, str]]()
    for kind, names in installed().items():
        registry = registries.get(kind, Registry(kind, kind))
        for name in names:
            record = {"kind": kind, "name": name}
            try:
                record["part"] = described(load(announced(kind, name)))
                if registry.get(name) is not None:
                    raise ConfigError(f"{name} is a name of this package, which stays; name it as module:Class")
                registry.find(name)
            except AgentLightningError as error:
                record["problem"] = str(error)
            found.append(record)
    return found


def _print(record: dict[str, Any], console: Console) -> None:
    for name, value in record.items():
        if name != "extensions":
            shown = [f"{key} {each}".strip() for key, each in value.items()] if isinstance(value, dict) else value
            console.print(f"{name:<10} {printable(', '.join(shown or ['none']))}")
    for each in record["extensions"]:
        console.print(f"extension  {each['kind']}  {each['name']}  {printable(each.get('part', ''))}")
        if "problem" in each:
            console.print(f"  problem  {printable(each['problem'])}", style="yellow")
