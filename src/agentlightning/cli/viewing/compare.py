"""`agl compare`: several seeds of one configuration beside those of another, with intervals over the seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.output import Result, agl
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def compare(runs: Annotated[list[Path], typer.Argument(help="The directories of finished runs.")]) -> Result:
    """Compare configurations over seeds: mean and 95% interval of the held-out reward, and of their difference.

    Runs whose settings differ in the seed alone are one configuration. The first one named is what the others are
    compared with: seed by seed where all have the same seeds.

    \b
    Examples:
      agl compare runs/grpo-1 runs/grpo-2 runs/dapo-1 runs/dapo-2
      agl compare runs/*
    """
    from agentlightning.dashboard.data.configurations import configurations, record_of

    found = configurations(runs)
    for run in runs:
        if not (run / "report.json").exists():
            raise ConfigError(f"{run} has no report.json: the run is not finished; finish it, or leave it out")
    record = {"configurations": record_of(found)}
    return Result(record, lambda console: _print(record, console), [agl("report", runs[0])])


def _print(record: Mapping[str, Any], console: Console) -> None:
    for row in record["configurations"]:
        settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
        seeds = ", ".join(map(str, row["seeds"]))
        console.print(f"{row['label']} (seeds {seeds}): {settings or 'the first configuration'}")
        for mode, after in row["after"].items():
            text = f"   {mode:<8} held-out reward {_text(after)}, gain {_text(row['gain'][mode], sign=True)}"
            if "difference" in row:
                how = "seed by seed" if row["difference"][mode]["paired"] else "means of different seeds"
                text += f", difference {_text(row['difference'][mode], sign=True)}, {how}"
            console.print(text)


def _text(number: Mapping[str, Any], *, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    if number["mean"] is None:
        return "unknown"
    if number["interval"] is None:
        return f"{number['mean']:{form}} (one seed: no interval)"
    low, high = number["interval"]
    return f"{number['mean']:{form}} ({low:{form}} to {high:{form}})"
