"""The page of the program `agl`: every verb with its arguments and options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from agentlightning.cli.main import build
from tools.reference.docstrings import cell, code
from tools.reference.python_names import MADE

START = f"""# The command line

{MADE}
`agl VERB --help` says the same. Settings of a run (`section.key=value`) are on [their page](settings/index.md).
"""


def page() -> str:
    """The whole page."""
    parts = [START, "| verb | |", "| --- | --- |"]
    found = list(verbs())
    parts += [f"| [`agl {name}`](#agl-{name.replace(' ', '-')}) | {cell(_first(verb.help))} |" for name, verb in found]
    parts += [text for name, verb in found for text in _verb(name, verb)]
    return "\n".join(parts) + "\n"


def verbs() -> Iterator[tuple[str, Any]]:
    """Each command with its name below `agl`."""
    yield from _below(typer.main.get_command(build()), "")


def _below(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _below(command, f"{path} {name}".strip())
        else:
            yield f"{path} {name}".strip(), command


def _first(text: str | None) -> str:
    return (text or "").split("\n\n")[0]


def _verb(name: str, verb: Any) -> Iterator[str]:
    yield f"\n## agl {name}\n"
    yield (verb.help or "").replace("\b\n", "").strip() + "\n"
    context = verb.context_class(verb, info_name=f"agl {name}")
    records = [each.get_help_record(context) for each in verb.params]
    shown = [record for record in records if record is not None and "--help" not in record[0]]
    if shown:
        yield "| argument or option | |\n| --- | --- |"
    for names, text in shown:
        yield f"| {code(names.strip())} | {cell(text)} |"
