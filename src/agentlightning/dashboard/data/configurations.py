"""Runs by configuration: those whose settings differ in the seed alone are one, and each of them is one measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from agentlightning.config import TrainConfig
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.evaluation.intervals import UNBOUNDED, Interval, mean_of_seeds, seed_difference
from agentlightning.training.persistence.run_changes import changed_settings, leaves, settings_of_run, shown
from agentlightning.training.persistence.run_dir import RunState, read_state
from agentlightning.util.json_values import Json, loads

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
    rewards: list[float] = field(default_factory=list[float])
    """Of held-out tasks, in all measurements of its runs."""

    def add(self, run: Path, seed: int, state: RunState, report: Mapping[str, Any] | None) -> None:
        self.runs[seed] = run
        self.rewards += (reward for each in state.evaluations.values() for reward in each if reward is not None)
        if report is not None:
            self.reports[seed] = report

    @property
    def modes(self) -> list[str]:
        """Those that its runs measured the held-out tasks in."""
        return [*dict.fromkeys(mode for report in self.reports.values() for mode in report["held_out"])]

    def numbers(self, mode: str, name: str) -> dict[int, float]:
        """`after` or `gain` of the held-out reward, by seed; without runs in which no task has a reward."""
        known = {seed: report["held_out"].get(mode, {}).get(name) for seed, report in self.reports.items()}
        return {seed: value for seed, value in known.items() if value is not None}


def configurations(runs: Sequence[Path]) -> list[Configuration]:
    """The runs by configuration. Raises ConfigError for a run that is there twice, and for runs with different versions
    of a class of one's own; ResumeError where there is no run."""
    found: list[Configuration] = []
    for run in runs:
        settings, path, state = settings_of_run(run), run / "report.json", read_state(run)
        extensions = {name: each["sha256"] for name, each in state.extensions.items()}
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
        own.add(run, seed, state, loads(path.read_bytes()) if path.exists() else None)
    return found


def joined_runs(runs: Mapping[str, RunFiles]) -> list[Json]:
    """Of the runs by name those that differ in the seed alone, with the gain that they measured and its interval over
    seeds. A second run with a seed, and one that cannot be read, stand alone."""
    found: dict[str, tuple[Configuration, list[str]]] = {}
    for name, files in runs.items():
        try:
            config, state, report = files.config(), files.state(), files.report()
        except ResumeError:
            continue
        if config is None:
            continue
        settings = {
            key: each for key, each in leaves(config.model_dump(mode="json")) if not key.startswith(NO_SETTINGS)
        }
        extensions = {key: each["sha256"] for key, each in state.extensions.items()}
        own, names = found.setdefault(repr((settings, extensions)), (Configuration(config, extensions), []))
        if config.run.seed not in own.runs:
            names.append(name)
            own.add(files.path, config.run.seed, state, report)
    return [
        {"runs": names, "gain": _means(own, "gain", own.modes, bounds_of(own.rewards)[1])}
        for own, names in found.values()
        if len(names) > 1
    ]


def bounds_of(rewards: Sequence[float]) -> tuple[Interval, Interval]:
    """Those of a mean reward, and of a difference: 0 and 1 where all rewards lie in between, else none."""
    known = bool(rewards) and min(rewards) >= 0 and max(rewards) <= 1
    return ((0.0, 1.0), (-1.0, 1.0)) if known else (UNBOUNDED, UNBOUNDED)


def _means(own: Configuration, name: str, modes: Iterable[str], bounds: Interval) -> Json:
    return {mode: asdict(mean_of_seeds(own.numbers(mode, name), bounds)) for mode in modes}


def short_names(paths: Iterable[Path]) -> dict[Path, str]:
    """The ends of paths, as long as it takes to tell them apart.

    >>> list(short_names([Path("runs/a/ppo"), Path("runs/b/ppo")]).values())
    ['a/ppo', 'b/ppo']
    """
    found = {path: path.resolve().parts for path in paths}
    length = next(n for n in count(1) if len({parts[-n:] for parts in found.values()}) == len(set(found.values())))
    return {path: "/".join(parts[-length:]) for path, parts in found.items()}


def differing(first: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configurations differ."""
    return {name: values for name, values in changed_settings(first, other).items() if not name.startswith(NO_SETTINGS)}


def record_of(found: Sequence[Configuration]) -> list[Json]:
    """What the finished runs of each measured, with intervals over seeds, and its difference from the first one, as
    JSON values. Raises ConfigError where runs of one seed were measured on different tasks."""
    first, names = found[0], short_names(run for each in found for run in each.runs.values())
    modes = dict.fromkeys(mode for each in found for mode in each.modes)
    means, differences = bounds_of([reward for each in found for reward in each.rewards])
    rows: list[Json] = []
    for each in found:
        label = names[next(iter(each.runs.values()))]
        label += f" and {len(each.runs) - 1} more" if len(each.runs) > 1 else ""
        row: Json = {"label": label, "runs": [str(run) for run in each.runs.values()], "seeds": [*each.runs]}
        row["settings"] = _changes(shown(differing(first.settings, each.settings)))
        row["after"], row["gain"] = _means(each, "after", modes, means), _means(each, "gain", modes, differences)
        if each is not first:
            _check_tasks(first, each)
            row["difference"] = {
                mode: asdict(seed_difference(first.numbers(mode, "after"), each.numbers(mode, "after"), differences))
                for mode in modes
            }
        rows.append(row)
    return rows


def _changes(differences: Mapping[str, tuple[Any, Any]]) -> Json:
    """What the other configuration has, without the settings of the first's types, which it cannot have."""
    sections = tuple(name.removesuffix("type") for name in differences if name.endswith(".type"))
    return {name: new for name, (_, new) in differences.items() if new is not None or not name.startswith(sections)}


def _check_tasks(first: Configuration, other: Configuration) -> None:
    for seed in first.reports.keys() & other.reports.keys():
        runs = first.runs[seed], other.runs[seed]
        paths = [run / "data" / "held_out.jsonl" for run in runs]
        tasks = [path.read_bytes() if path.exists() else b"" for path in paths]
        if tasks[0] != tasks[1]:
            raise ConfigError(f"{runs[0]} and {runs[1]} were measured on different held-out tasks; compare equal ones")
