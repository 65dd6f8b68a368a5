"""The page of the program `agl`: every verb with its arguments and options."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import typer.main

from agentlightning.cli.main import Program, build
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
        command = group.load(name) if isinstance(group, Program) else command
        if hasattr(command, "commands"):
            yield from _below(command, f"{path} {name}".strip())
        else:
            yield f"{path} {name}".strip(), command


def _first(text: str | None) -> str:
    return (text or "").split("\n\n")[0]


def _paragraph(text: str) -> str:
    """One that keeps its lines has a list of commands or settings, which becomes a block."""
    if not text.startswith("\b\n"):
        return text
    return re.sub(r"(?:^  .*\n?)+", _block, text[2:], flags=re.MULTILINE).strip()


def _block(found: re.Match[str]) -> str:
    return f"\n```text\n{textwrap.dedent(found[0]).strip()}\n```\n\n"


def _verb(name: str, verb: Any) -> Iterator[str]:
    yield f"\n## agl {name}\n"
    yield "\n\n".join(map(_paragraph, (verb.help or "").strip().split("\n\n"))) + "\n"
    context = verb.context_class(verb, info_name=f"agl {name}")
    records = [each.get_help_record(context) for each in verb.params]
    shown = [record for record in records if record is not None and "--help" not in record[0]]
    if shown:
        yield "| argument or option | |\n| --- | --- |"
    for names, text in shown:
        yield f"| {code(names.strip())} | {cell(text)} |"
