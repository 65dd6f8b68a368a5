"""Writes a working folder for an agent: the agent, its reward, tasks, demonstrations, settings and a README."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from agentlightning.cli.starting.tickets import make_demonstrations, make_tasks
from agentlightning.errors import ConfigError

FILES: Final = Path(__file__).parent / "files"
TASKS: Final = 200
DEMONSTRATIONS: Final = 896


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of agent that a folder can be made for."""

    name: str
    about: str
    agent: str
    """The setting `agent`."""
    advice: str
    packages: Mapping[str, str]
    """What must be installed: module -> what pip calls it."""
    concurrency: int = 32

    @property
    def missing(self) -> list[str]:
        """The packages to install."""
        return [package for module, package in self.packages.items() if find_spec(module) is None]


_FUNCTION: Final = "Any function of a task will do; its parameters are filled by name (docs/guides/your-own-agent.md)."
_FRAMEWORK: Final = f"{_FUNCTION} Its model calls must go to OPENAI_BASE_URL, as they do here."

KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("function", "a plain function", "agent.py:route", _FUNCTION, {"openai": "openai"}),
        Kind(
            "command",
            "a command in any language",
            "python3 agent.py",
            "Set `agent` in `agl.toml` to its command line.",
            {},
            concurrency=8,
        ),
        Kind(
            "langgraph",
            "a graph of LangGraph",
            "agent.py:route",
            _FRAMEWORK,
            {"langgraph": "langgraph", "langchain_openai": "langchain-openai"},
        ),
        Kind(
            "openai-agents",
            "an agent of the OpenAI Agents SDK",
            "agent.py:route",
            _FRAMEWORK,
            {"agents": "openai-agents"},
        ),
    )
}


def files_of(kind: Kind) -> dict[str, str]:
    """The files of a folder for this kind of agent, by name."""
    tasks, demonstrations = make_tasks(TASKS), make_demonstrations(DEMONSTRATIONS)
    install = f"pip install {' '.join(kind.packages.values())}\n" if kind.packages else ""
    return {
        "agent.py": _template(kind.name, "agent.py"),
        "reward.py": _template("shared", "reward.py"),
        "tasks.jsonl": _jsonl(tasks),
        "demonstrations.jsonl": _jsonl(demonstrations),
        "agl.toml": _template("shared", "agl.toml").format(agent=kind.agent, concurrency=kind.concurrency),
        "README.md": _template("shared", "README.md").format(
            kind=kind.about,
            tasks=len(tasks),
            demonstrations=len(demonstrations),
            install=install,
            advice=kind.advice,
        ),
    }


def write_folder(directory: Path, kind: Kind) -> list[Path]:
    """Write the files. Raises ConfigError, and writes nothing, where one of them exists."""
    files = files_of(kind)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give a directory")
    if taken := [name for name in files if (directory / name).exists()]:
        raise ConfigError(
            f"{directory} has {', '.join(taken)} already, and nothing is overwritten; give another directory:"
            " agl init DIR"
        )
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, text in files.items():
        with (directory / name).open("x", encoding="utf-8") as file:
            file.write(text)
        written.append(directory / name)
    return written


def _template(folder: str, name: str) -> str:
    return (FILES / folder / f"{name}.txt").read_text("utf-8")


def _jsonl(records: Iterable[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
