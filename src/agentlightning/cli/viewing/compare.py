"""`agl compare`: several seeds of one configuration beside those of another, with intervals over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from agentlightning.cli.options import Json
from agentlightning.cli.output import agl, open_output

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.config import TrainConfig

NO_SETTINGS: Final = ("run.seed", "run.host", "run.port", "run.public_url", "tracking.")
"""What may differ between the runs of one configuration."""


@dataclass(slots=True)
class Configuration:
    """The finished runs of one configuration."""

    settings: TrainConfig
    extensions: Mapping[str, Any]
    runs: dict[int, Path] = field(default_factory=dict[int, Path])
    """By seed."""
    reports: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])

    def numbers(self, mode: str, name: str) -> dict[int, float]:
        """`after` or `gain` of the held-out reward, by seed; without runs in which no task has a reward."""
        known = {seed: report["held_out"].get(mode, {}).get(name) for seed, report in self.reports.items()}
        return {seed: value for seed, value in known.items() if value is not None}


def compare(
    runs: Annotated[list[Path], typer.Argument(help="The directories of finished runs.")], as_json: Json = False
) -> None:
    """Compare configurations over seeds: mean and 95% interval of the held-out reward, and of their difference.

    Runs whose settings differ in the seed alone are one configuration. The first one named is what the others are
    compared with: seed by seed where all have the same seeds.

    \b
    Examples:
      agl compare runs/grpo-1 runs/grpo-2 runs/dapo-1 runs/dapo-2
      agl compare runs/*
    """
    with open_output(as_json) as output:
        found = configurations(runs)
        record = record_of(found)
        output.finish(record, lambda console: _print(record, console), agl("report", runs[0]))


def configurations(runs: Sequence[Path]) -> list[Configuration]:
    """The runs by configuration. Raises ConfigError for a run that is not finished, or is there twice, and for runs
    with different versions of a class of one's own; ResumeError where there is no run."""
    from agentlightning.errors import ConfigError
    from agentlightning.training.persistence.run_changes import settings_of_run
    from agentlightning.training.persistence.run_dir import read_state
    from agentlightning.util.json_values import loads

    found: list[Configuration] = []
    for run in runs:
        settings, path = settings_of_run(run), run / "report.json"
        extensions = {name: each["sha256"] for name, each in read_state(run).extensions.items()}
        if not path.exists():
            raise ConfigError(f"{run} has no report.json: the run is not finished; finish it, or leave it out")
        own = next((each for each in found if not differing(each.settings, settings)), None)
        if own is None:
            found.append(own := Configuration(settings, extensions))
        if extensions != own.extensions:
            changed = ", ".join(sorted(name for name in extensions if extensions[name] != own.extensions.get(name)))
            raise ConfigError(
                f"{run} was trained with another version of {changed} than {next(iter(own.runs.values()))}"
            )
        seed = settings.run.seed
        if seed in own.runs:
            raise ConfigError(f"{own.runs[seed]} and {run} are one configuration with one seed ({seed}); leave one out")
        own.runs[seed], own.reports[seed] = run, loads(path.read_bytes())
    return found


def differing(first: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configurations differ."""
    from agentlightning.training.persistence.run_changes import changed_settings

    return {name: values for name, values in changed_settings(first, other).items() if not name.startswith(NO_SETTINGS)}


def record_of(found: Sequence[Configuration]) -> dict[str, Any]:
    """The comparison as JSON values. Raises ConfigError where runs of one seed were measured on different tasks."""
    from agentlightning.evaluation.comparison import mean_of_seeds, seed_difference

    first = found[0]
    modes = list(next(iter(first.reports.values()))["held_out"])
    rows: list[dict[str, Any]] = []
    for each in found:
        row: dict[str, Any] = {"runs": [str(run) for run in each.runs.values()], "seeds": list(each.runs)}
        row["settings"] = {name: new for name, (_, new) in differing(first.settings, each.settings).items()}
        for name in ("after", "gain"):
            row[name] = {mode: asdict(mean_of_seeds(each.numbers(mode, name))) for mode in modes}
        if each is not first:
            _check_tasks(first, each)
            row["difference"] = {
                mode: asdict(seed_difference(first.numbers(mode, "after"), each.numbers(mode, "after")))
                for mode in modes
            }
        rows.append(row)
    return {"configurations": rows}


def _check_tasks(first: Configuration, other: Configuration) -> None:
    from agentlightning.errors import ConfigError

    for seed in first.runs.keys() & other.runs.keys():
        runs = first.runs[seed], other.runs[seed]
        tasks = [(run / "data" / "held_out.jsonl").read_bytes() for run in runs]
        if tasks[0] != tasks[1]:
            raise ConfigError(f"{runs[0]} and {runs[1]} were measured on different held-out tasks; compare equal ones")


def _print(record: Mapping[str, Any], console: Console) -> None:
    for number, row in enumerate(record["configurations"]):
        settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
        seeds = ", ".join(map(str, row["seeds"]))
        console.print(f"{number}: {settings or 'the first configuration'} (seeds {seeds})", markup=False)
        for mode, after in row["after"].items():
            text = f"   {mode:<8} held-out reward {_text(after)}, gain {_text(row['gain'][mode], sign=True)}"
            if "difference" in row:
                how = "seed by seed" if row["difference"][mode]["paired"] else "means of different seeds"
                text += f", difference {_text(row['difference'][mode], sign=True)}, {how}"
            console.print(text, markup=False)


def _text(number: Mapping[str, Any], *, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    if number["mean"] is None:
        return "unknown"
    if number["interval"] is None:
        return f"{number['mean']:{form}} (one seed: no interval)"
    low, high = number["interval"]
    return f"{number['mean']:{form}} ({low:{form}} to {high:{form}})"
