"""`agl init`: makes a working folder for one's own agent. `agl model`: brings a model to this machine."""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console

from agentlightning.cli.options import MODEL_HELP
from agentlightning.cli.output import Result, agl
from agentlightning.errors import ConfigError


def init(
    directory: Annotated[Path, typer.Argument(help="The folder to make (default: the current one).")] = Path("."),
    kind: Annotated[
        Literal["function", "command", "langgraph", "openai-agents"] | None,
        typer.Option(help="The kind of agent; asked for without it.", show_default=False),
    ] = None,
) -> Result:
    """Make a working folder to train an agent in: the agent, its reward, tasks, settings and a README.

    Nothing is overwritten: where one of its files exists, nothing is written.

    \b
    Examples:
      agl init my-agent --kind function
      agl init --kind langgraph
    """
    chosen = KINDS[kind] if kind is not None else _ask()
    written = [str(path) for path in write_folder(directory, chosen)]
    record = {"directory": str(directory), "kind": chosen.name, "files": written, "install": chosen.missing}
    shown = "\n".join(f"wrote {path}" for path in written)
    return Result(record, lambda console: console.print(shown), _next_commands(directory, chosen))


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


def _next_commands(directory: Path, kind: Kind) -> list[str]:
    return [
        *([] if directory.resolve() == Path.cwd() else [shlex.join(["cd", str(directory)])]),
        *([f"pip install {' '.join(kind.missing)}"] if kind.missing else []),
        "agl train --dry-run",
        "agl train",
    ]


# -- the files of a folder --------------------------------------------------------------------------------------------


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


# -- its tasks and demonstrations -------------------------------------------------------------------------------------


INSTRUCTIONS: Final = "Which team is this for: billing, shipping, account or technical? Answer with one word."
"""What every agent of a new folder tells the model."""
PROBLEMS: Final = {
    "billing": (
        "I was charged twice this month",
        "the invoice shows the wrong amount",
        "I would like a refund for my last order",
        "my card was declined although it is valid",
        "the discount is missing on my bill",
        "please send the receipt for my payment",
        "the price went up without a notice",
        "I paid in euros and was billed in dollars",
    ),
    "shipping": (
        "the parcel has not arrived",
        "the tracking number does not work",
        "my package was left with a neighbour I do not know",
        "the box was damaged by the courier",
        "please deliver to another street",
        "the delivery came without the second item",
        "when will the order leave the warehouse",
        "the courier says nobody was at home",
    ),
    "account": (
        "I cannot log in since yesterday",
        "please change the email address of my profile",
        "the password reset link has expired",
        "I want to delete my profile",
        "my username is taken by somebody else",
        "two people should share one login",
        "the code for signing in never comes",
        "my profile shows the name of a stranger",
    ),
    "technical": (
        "the app crashes when I open a photo",
        "the screen stays black after the update",
        "the export button does nothing",
        "search finds no results in the app",
        "the device does not connect to the network",
        "an error 500 appears on the start page",
        "the battery of the device is empty in an hour",
        "the app is slow on my phone",
    ),
}
CLEAN, HABIT, FALLBACK = 0.6, 0.9, "technical"
OPENINGS: Final = ("Hello,", "Hi,", "Good morning,", "Dear team,", "Sorry to bother you,", "Urgent:", "Once more:")
CLOSINGS: Final = ("Please help.", "What can I do?", "Thank you.", "Who takes care of it?", "I am waiting.")


def make_tasks(count: int) -> list[dict[str, Any]]:
    """`count` different messages, each with its team; every team has as many."""
    return _all_tasks()[:count]


def make_demonstrations(count: int) -> list[dict[str, Any]]:
    """`count` conversations about messages that are the last to become tasks. The first `CLEAN` share names the right
    team; of the rest, a `HABIT` share passes the message on to the technical team, whatever it says."""
    rng = random.Random("demonstrations")
    return [
        _conversation(task["message"], FALLBACK if i >= CLEAN * count and rng.random() < HABIT else task["team"])
        for i, task in enumerate(reversed(_all_tasks()[-count:]))
    ]


def _all_tasks() -> list[dict[str, Any]]:
    """Every message that can be made, in an order that is the same on every machine; the teams take turns."""
    rng = random.Random("tasks")
    texts = {team: [f"{a} {b}. {c}" for a in OPENINGS for b in PROBLEMS[team] for c in CLOSINGS] for team in PROBLEMS}
    for each in texts.values():
        rng.shuffle(each)
    rounds = zip(*([{"message": text, "team": team} for text in each] for team, each in texts.items()), strict=True)
    return [task for each in rounds for task in each]


def _conversation(message: str, team: str) -> dict[str, Any]:
    told = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": message}]
    return {"messages": [*told, {"role": "assistant", "content": team}]}


# -- agl model --------------------------------------------------------------------------------------------------------


def get_model(name: Annotated[str, typer.Argument(help=MODEL_HELP)]) -> Result:
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

    def show(console: Console) -> None:
        console.print(directory)
        typer.echo(f"next  {agl('demo', model=name)}", err=True)  # There, as scripts read the directory.

    return Result({"name": name, "directory": directory}, show)


MODEL: Final = {"get": get_model}
