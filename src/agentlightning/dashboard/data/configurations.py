"""Runs by configuration: those whose settings differ in the seed alone are one, and each of them is one measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.config import TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.evaluation.comparison import mean_of_seeds, seed_difference
from agentlightning.training.persistence.run_changes import changed_settings, settings_of_run
from agentlightning.training.persistence.run_dir import read_state
from agentlightning.util.json_values import loads

NO_SETTINGS: Final = ("run.seed", "run.host", "run.port", "run.public_url", "tracking.")
"""What may differ between the runs of one configuration."""


@dataclass(slots=True)
class Configuration:
    """The runs of one configuration."""

    settings: TrainConfig
    extensions: Mapping[str, Any]
    runs: dict[int, Path] = field(default_factory=dict[int, Path])
    """By seed."""
    reports: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    """Of those that are finished."""

    def numbers(self, mode: str, name: str) -> dict[int, float]:
        """`after` or `gain` of the held-out reward, by seed; without runs in which no task has a reward."""
        known = {seed: report["held_out"].get(mode, {}).get(name) for seed, report in self.reports.items()}
        return {seed: value for seed, value in known.items() if value is not None}


def configurations(runs: Sequence[Path]) -> list[Configuration]:
    """The runs by configuration. Raises ConfigError for a run that is there twice, and for runs with different versions
    of a class of one's own; ResumeError where there is no run."""
    found: list[Configuration] = []
    for run in runs:
        settings, path = settings_of_run(run), run / "report.json"
        extensions = {name: each["sha256"] for name, each in read_state(run).extensions.items()}
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
        own.runs[seed] = run
        if path.exists():
            own.reports[seed] = loads(path.read_bytes())
    return found


def differing(first: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configurations differ."""
    return {name: values for name, values in changed_settings(first, other).items() if not name.startswith(NO_SETTINGS)}


def record_of(found: Sequence[Configuration]) -> list[dict[str, Any]]:
    """What the finished runs of each measured, with intervals over seeds, and its difference from the first one, as
    JSON values. Raises ConfigError where runs of one seed were measured on different tasks."""
    first = found[0]
    modes = dict.fromkeys(mode for each in found for report in each.reports.values() for mode in report["held_out"])
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
    return rows


def _check_tasks(first: Configuration, other: Configuration) -> None:
    for seed in first.reports.keys() & other.reports.keys():
        runs = first.runs[seed], other.runs[seed]
        paths = [run / "data" / "held_out.jsonl" for run in runs]
        tasks = [path.read_bytes() if path.exists() else b"" for path in paths]
        if tasks[0] != tasks[1]:
            raise ConfigError(f"{runs[0]} and {runs[1]} were measured on different held-out tasks; compare equal ones")
