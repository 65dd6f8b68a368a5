"""`agl init`: makes a working folder for one's own agent. `agl model`: brings a model to this machine."""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import typer
from typer import Argument

from agentlightning.cli.options import MODEL_HELP
from agentlightning.cli.output import Result, agl, writing
from agentlightning.errors import ConfigError


def init(
    directory: Path = Argument(Path(".")),
    kind: Literal["function", "command", "langgraph", "openai-agents"] | None = None,
) -> Result:
    """Make a working folder to train an agent in: the agent, its reward, tasks, settings and a README.

    Nothing is overwritten: where one of its files exists, nothing is written.

    directory: The folder to make (default: the current one).
    kind: The kind of agent; asked for without it.

    \b
    Examples:
      agl init my-agent --kind function
      agl init --kind langgraph
    """
    chosen = KINDS[kind] if kind is not None else _ask()
    written = [str(path) for path in write_folder(directory, chosen)]
    record = {"directory": str(directory), "kind": chosen.name, "files": written, "install": chosen.missing}
    after = [
        *([] if directory.resolve() == Path.cwd() else [shlex.join(["cd", str(directory)])]),
        *([f"pip install {' '.join(chosen.missing)}"] if chosen.missing else []),
        "agl train --dry-run",
        "agl train",
    ]
    return Result(record, [f"wrote {path}" for path in written], after)


def _ask() -> Kind:
    """The kind that the user chooses. Raises ConfigError where there is nobody to ask."""
    if not sys.stdin.isatty():
        raise ConfigError(f"which kind of agent? Give one: --kind {'|'.join(KINDS)}")
    numbered = {str(number): each for number, each in enumerate(KINDS.values(), 1)}
    for number, each in numbered.items():
        typer.echo(f"{number}  {each.name:<14} {each.about}", err=True)
    choice = str(typer.prompt("the kind of your agent", default="1", err=True)).strip()
    chosen = numbered.get(choice) or KINDS.get(choice)
    if chosen is None:
        raise ConfigError(f"{choice!r} is no kind of agent; choose one of {', '.join([*numbered, *KINDS])}")
    return chosen


# -- the files of a folder --------------------------------------------------------------------------------------------


FILES = Path(__file__).parent / "files"
TASKS = 200
DEMONSTRATIONS = 896
CLEAN, HABIT = 0.6, 0.9
INSTRUCTIONS = "Which team is this for: billing, shipping, account or technical? Answer with one word."
"""What every agent of a new folder tells the model."""


_FUNCTION = "Any function of a task will do; its parameters are filled by name (docs/guides/your-own-agent.md)."
_FRAMEWORK = f"{_FUNCTION} Its model calls must go to OPENAI_BASE_URL, as they do here."
_COMMAND = "Set `agent` in `agl.toml` to its command line."


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of agent that a folder can be made for."""

    name: str
    about: str
    packages: Mapping[str, str]
    """What must be installed: module -> what pip calls it."""
    agent: str = "agent.py:route"
    """The setting `agent`."""
    advice: str = _FRAMEWORK
    concurrency: int = 32

    @property
    def missing(self) -> list[str]:
        """The packages to install."""
        return [package for module, package in self.packages.items() if find_spec(module) is None]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("function", "a plain function", {"openai": "openai"}, advice=_FUNCTION),
        Kind("command", "a command in any language", {}, "python3 agent.py", _COMMAND, concurrency=8),
        Kind("langgraph", "a graph of LangGraph", {"langgraph": "langgraph", "langchain_openai": "langchain-openai"}),
        Kind("openai-agents", "an agent of the OpenAI Agents SDK", {"agents": "openai-agents"}),
    )
}


def files_of(kind: Kind) -> dict[str, str]:
    """The files of a folder for this kind of agent, by name."""
    tasks, demonstrations = _make_records()
    values: dict[str, Any] = {"kind": kind, "tasks": len(tasks), "demonstrations": len(demonstrations)}
    values["install"] = f"pip install {' '.join(kind.packages.values())}\n" if kind.packages else ""
    return {
        "agent.py": _template(f"{kind.name}/agent.py.txt"),
        "reward.py": _template("shared/reward.py.txt"),
        "tasks.jsonl": "".join(json.dumps(each) + "\n" for each in tasks),
        "demonstrations.jsonl": "".join(json.dumps(each) + "\n" for each in demonstrations),
        "agl.toml": _template("shared/agl.toml.txt").format(**values),
        "README.md": _template("shared/README.md.txt").format(**values),
    }


def write_folder(directory: Path, kind: Kind) -> list[Path]:
    """Write the files. Raises ConfigError, and writes nothing, where one of them exists."""
    files = {directory / name: text for name, text in files_of(kind).items()}
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give a directory")
    if taken := [path.name for path in files if path.exists()]:
        raise ConfigError(
            f"{directory} has {', '.join(taken)} already, and nothing is overwritten; give another directory:"
            " agl init DIR"
        )
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    return list(files)


def _template(name: str) -> str:
    return (FILES / name).read_text("utf-8")


def _make_records() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tasks, and conversations about other messages, in an order that is the same on every machine: every team has as
    many tasks. Of the conversations, the first `CLEAN` share names the right team; of the rest, a `HABIT` share passes
    the message on to the technical team, whatever it says."""
    rng, parts = random.Random("tasks"), json.loads(_template("shared/messages.json"))
    made: list[list[dict[str, Any]]] = []
    for team, problems in parts["problems"].items():
        texts = [f"{a} {b}. {c}" for a in parts["openings"] for b in problems for c in parts["closings"]]
        rng.shuffle(texts)
        made.append([{"message": text, "team": team} for text in texts])
    tasks = [task for each in zip(*made, strict=True) for task in each]
    rng, conversations = random.Random("demonstrations"), list[dict[str, Any]]()
    for place, task in enumerate(reversed(tasks[-DEMONSTRATIONS:])):
        has_habit = place >= CLEAN * DEMONSTRATIONS and rng.random() < HABIT
        answer = {"role": "assistant", "content": "technical" if has_habit else task["team"]}
        asked = {"role": "user", "content": task["message"]}
        conversations.append({"messages": [{"role": "system", "content": INSTRUCTIONS}, asked, answer]})
    return tasks[:TASKS], conversations


# -- agl model --------------------------------------------------------------------------------------------------------


def get_model(name: str = Argument(help=MODEL_HELP)) -> Result:
    """Fetch and convert a model, unless it is here, and print its directory.

    \b
    Examples:
      agl model get smollm2-135m
      agl model get Qwen/Qwen2.5-0.5B-Instruct --json
    """
    from agentlightning.models.resolve import TINY, resolve_model

    if name == TINY:
        raise ConfigError("tiny is made where it is used; there is nothing to get")
    directory = resolve_model(name)

    def lines() -> Iterator[str]:
        yield directory
        typer.echo(f"next  {agl('demo', model=name)}", err=True)  # There, as scripts read the directory.

    return Result({"name": name, "directory": directory}, lines())


MODEL = {"get": get_model}
