"""Reads the files of run directories, which other processes may be writing: one run, its state, and several by
configuration. Each file is read again when it has changed."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from agentlightning.config import TrainConfig
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.evaluation.intervals import UNBOUNDED, Interval, mean_of_seeds, seed_difference
from agentlightning.resources import prompts_in
from agentlightning.training.governance import AUDIT_FILE, AuditRecord, audit_record, last_times
from agentlightning.training.health.signs import SignHistory, sign_history
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.checkpoints import read_resources
from agentlightning.training.persistence.run_dir import (
    RunState,
    changed_settings,
    check_run,
    flat_settings,
    leaves,
    read_state,
    settings_of_run,
    shown,
)
from agentlightning.training.report.result import failures_of, prompt_diff, read_record, status_of
from agentlightning.util.json_values import Json

T = TypeVar("T")
Signature = tuple[int, int] | None
"""(time of the last change in nanoseconds, size in bytes) of a file; None: there is none."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """What was read of a file that is appended to."""

    file: int | None = None
    """Its number in the file system: another one has taken its place where that differs."""
    end: int = 0
    """Where the lines that were read end."""
    last: bytes = b""
    """The last of them."""
    values: list[Any] = field(default_factory=list[Any])
    """What they hold."""


class RunFiles:
    """The files of one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        """Unless a catalog has another one of that name."""
        self._cache: dict[str, tuple[Signature, Any]] = {}
        self._lines: dict[str, _Lines] = {}
        self._history: tuple[list[StepRecord], list[SignHistory]] = [], []
        """Steps, and the signs of trouble in them."""

    def state(self) -> RunState:
        """Raises ResumeError where it cannot be read."""
        return self._read("state.json", lambda: read_state(self.path))

    def status(self) -> Literal["running", "finished", "unfinished"]:
        """unfinished: no process has the run open, and there is no report."""
        return status_of(self.path)

    def metrics(self) -> list[Json]:
        """The lines of `metrics.jsonl` that can be read."""
        return self._read_lines("metrics", "metrics.jsonl", _json_objects)

    def records(self) -> list[StepRecord]:
        """The steps, as far as their metrics can be read."""
        return self._read_lines("records", "metrics.jsonl", lambda _, line: [*filter(None, [read_record(line)])])

    def signs(self) -> list[SignHistory]:
        """The signs of trouble since which step. Takes seconds for a run of thousands of steps, the first time: call it
        in a thread."""
        (judged, found), records = self._history, self.records()
        if records[: len(judged)] != judged:  # steps were repeated
            judged, found = [], []
        if len(records) > len(judged):
            found = sign_history(records, found, len(judged))
        self._history = records, found
        return found

    def report(self) -> Json | None:
        """The result; None for a run that has none yet, or none that can be read."""
        return self._read("report.json", self._load_report)

    def _load_report(self) -> Json | None:
        with suppress(OSError):
            return next(iter(_json_objects(0, (self.path / "report.json").read_bytes())), None)

    def config(self) -> TrainConfig | None:
        """The settings; None where there are none, or this version cannot read them (`config_error`)."""
        return self._read("config.toml", self._load_config)[0]

    def config_error(self) -> str:
        """Why there are no settings."""
        return self._read("config.toml", self._load_config)[1]

    def settings(self) -> Json:
        """The settings by their full names in order, without secrets."""
        config = self.config()
        return {} if config is None else dict(sorted(flat_settings(config).items()))

    def audit(self) -> list[AuditRecord]:
        """Raises ConfigError where it cannot be read."""
        path = self.path / AUDIT_FILE
        lines = self._read_lines("audit", AUDIT_FILE, lambda number, line: [audit_record(path, number, line)])
        return last_times(lines)

    def changes(self) -> list[Json]:
        """What resumes have changed."""
        return self._read_lines("changes", "changes.jsonl", _json_objects)

    def tasks(self, name: str) -> list[Any]:
        """The tasks of `train`, `validation` or `held_out`."""
        return self._read_lines(f"tasks {name}", f"data/{name}.jsonl", _json_values)

    def steps(self) -> int | None:
        """The steps of the whole run. None: its settings do not say, as those of an algorithm object do not."""
        state, config, steps = self.state(), self.config(), None
        if config is not None:
            steps = getattr(config.algorithm, "steps", None)
        else:  # of another version, or of a class that is not here
            with suppress(OSError, ValueError, LookupError, TypeError):
                steps = tomllib.loads((self.path / "config.toml").read_text("utf-8"))["algorithm"]["steps"]
        return None if state.algorithm or state.recorded or not isinstance(steps, int) else steps

    def seconds_left(self) -> float | None:
        """By the mean time of the steps so far; None where it cannot be known."""
        state, total = self.state(), self.steps()
        return state.seconds / state.step * max(0, total - state.step) if total and state.step else None

    def prompts(self) -> Json:
        """The prompts that would be the result if the run ended now, and what has changed in them since it began."""
        checkpoint = "checkpoint" if self.status() == "finished" else self.state().checkpoint
        found = prompts_in(read_resources(self.path, checkpoint))
        config = self.config() if found else None  # None: of another version, so that they are shown as they are.
        diff = prompt_diff({} if config is None else config.prompts, found)
        return {"prompts": {name: each.template for name, each in found.items()}, "prompt_diff": diff}

    def learned(self) -> dict[int, tuple[str, ...]]:
        """The rollouts that steps were given to learn from, the last step first, as far as the audit log says."""
        return {each.step: each.rollouts for each in reversed(self.audit()) if each.action == "learned"}

    def changed(self) -> float:
        """When the state last did, in seconds since 1970."""
        return (self._signature("state.json") or (0, 0))[0] / 1e9

    def _load_config(self) -> tuple[TrainConfig | None, str]:
        try:
            return settings_of_run(self.path), ""
        except AgentLightningError as error:
            return None, str(error)

    def _signature(self, name: str) -> Signature:
        try:
            found = (self.path / name).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _read(self, name: str, read: Callable[[], T]) -> T:
        signature, known = self._signature(name), self._cache.get(name)
        if known is None or known[0] != signature:
            known = self._cache[name] = signature, read()
        return known[1]

    def _read_lines(self, key: str, name: str, decode: Callable[[int, bytes], list[Any]]) -> list[Any]:
        """What the lines of a file hold, by their text and number, which is right where each holds one value. A last
        one without an end is being written. Read is what was appended since the last time; all of a file that was
        replaced, or cut."""
        known = self._lines.get(key, _Lines())
        try:
            file = (self.path / name).open("rb")
        except FileNotFoundError:
            return []
        with file:
            number = os.fstat(file.fileno()).st_ino
            file.seek(known.end - len(known.last))
            if number != known.file or file.read(len(known.last)) != known.last:
                known = _Lines(number)
                file.seek(0)
            whole, end, _ = file.read().rpartition(b"\n")
        if end:
            lines = whole.split(b"\n")
            values = [value for line in enumerate(lines, len(known.values) + 1) for value in decode(*line)]
            known = _Lines(number, known.end + len(whole) + 1, lines[-1] + end, known.values + values)
        self._lines[key] = known
        return known.values


def open_run(path: Path) -> RunFiles:
    """Raises ConfigError where there is no run."""
    check_run(path)
    return RunFiles(path)


def _json_values(_: int, line: bytes) -> list[Any]:
    try:
        return [orjson.loads(line)]
    except orjson.JSONDecodeError:  # `damaged_lines` of the examination names it
        return []


def _json_objects(number: int, line: bytes) -> list[Json]:
    return [each for each in _json_values(number, line) if isinstance(each, dict)]


# -- the state of a run, as `agl status` prints it --------------------------------------------------------------------


def status_record(files: RunFiles) -> tuple[Json, list[float | None]]:
    """The state of a run as JSON values, and its rewards by step. Raises ResumeError for a state that cannot be
    read."""
    state, status, records = files.state(), files.status(), files.records()
    validated = next((each for each in reversed(records) if each.validation), StepRecord())
    left = None if status == "finished" else files.seconds_left()
    rewards = [each.reward for each in records]
    known = [each for each in rewards if each is not None]
    measured = [(name.partition("before-")[2], each) for name, each in state.evaluations.items()]
    start = {mode: [value for value in each if value is not None] for mode, each in measured if mode}
    record = {
        "run_dir": str(files.path),
        "status": status,
        "step": state.step,
        "steps": files.steps(),
        "seconds": round(state.seconds, 1),
        "seconds_left": left and round(left, 1),
        "reward": known[-1] if known else None,
        "first_reward": known[0] if known else None,
        "best_reward": max(known, default=None),
        "start": {mode: sum(each) / len(each) for mode, each in start.items() if each},
        "start_tasks": {mode: (len(start[mode]), len(each)) for mode, each in measured if start.get(mode)},
        "validation": dict(validated.validation),
        "validated_at": validated.step or None,
        "tokens_per_second": records[-1].tokens_per_second if records else None,
        "sessions": state.recorded and state.recorded.sessions,
        "rollouts": state.rollouts,
        "failed_rollouts": state.failed_rollouts,
        "rejected_rollouts": dict(state.rejected),
        "failures": [asdict(each) for each in failures_of(files.path / "store.db", state, [])],
        "warnings": dict(state.warnings),
        **files.prompts(),
    }
    return record, rewards


# -- runs by configuration: those whose settings differ in the seed alone ---------------------------------------------


NO_SETTINGS = ("run.seed", "run.host", "run.port", "run.public_url", "tracking.")
"""What may differ between the runs of one configuration."""


@dataclass(slots=True)
class Configuration:
    """The runs of one configuration."""

    settings: TrainConfig
    key: str
    """Equal where all settings but those of NO_SETTINGS are."""
    extensions: Mapping[str, Any]
    """The digests of the classes of one's own."""
    runs: dict[int, RunFiles] = field(default_factory=dict[int, RunFiles])
    """By seed."""

    @property
    def reports(self) -> dict[int, Json]:
        """Of those that are finished."""
        return {seed: found for seed, run in self.runs.items() if (found := run.report()) is not None}

    @property
    def rewards(self) -> list[float]:
        """Of held-out tasks, in all measurements of its runs."""
        found = [each for run in self.runs.values() for each in run.state().evaluations.values()]
        return [reward for each in found for reward in each if reward is not None]

    @property
    def modes(self) -> list[str]:
        """Those that its runs measured the held-out tasks in."""
        return [*dict.fromkeys(mode for report in self.reports.values() for mode in report["held_out"])]

    def numbers(self, mode: str, name: str) -> dict[int, float]:
        """`after` or `gain` of the held-out reward, by seed; without runs in which no task has a reward."""
        known = {seed: report["held_out"].get(mode, {}).get(name) for seed, report in self.reports.items()}
        return {seed: value for seed, value in known.items() if value is not None}


def configurations(runs: Iterable[RunFiles]) -> list[Configuration]:
    """The runs by configuration. A second run with a seed is one of its own, and so are runs with another version of a
    class of one's own. Raises ConfigError or ResumeError where there is no run, and for settings that cannot be
    read."""
    found: list[Configuration] = []
    for run in runs:
        if (config := run.config()) is None:
            raise ConfigError(run.config_error())
        settings = leaves(config.model_dump(mode="json"))
        key = repr({name: each for name, each in settings if not name.startswith(NO_SETTINGS)})
        extensions = {name: each["sha256"] for name, each in run.state().extensions.items()}
        same = (each for each in found if (each.key, each.extensions) == (key, extensions))
        own = next((each for each in same if config.run.seed not in each.runs), None)
        if own is None:
            found.append(own := Configuration(config, key, extensions))
        own.runs[config.run.seed] = run
    return found


def joined_runs(runs: Iterable[RunFiles]) -> list[Json]:
    """Those that differ in the seed alone, with the gain that they measured and its interval over seeds. Raises as
    `configurations`."""
    return [
        {
            "runs": [run.name for run in each.runs.values()],
            "gain": _means(each, "gain", each.modes, bounds_of(each.rewards)[1]),
        }
        for each in configurations(runs)
        if len(each.runs) > 1
    ]


def bounds_of(rewards: Sequence[float]) -> tuple[Interval, Interval]:
    """Those of a mean reward, and of a difference: 0 and 1 where all rewards lie in between, else none."""
    known = bool(rewards) and min(rewards) >= 0 and max(rewards) <= 1
    return ((0.0, 1.0), (-1.0, 1.0)) if known else (UNBOUNDED, UNBOUNDED)


def _means(own: Configuration, name: str, modes: Iterable[str], bounds: Interval) -> Json:
    return {mode: asdict(mean_of_seeds(own.numbers(mode, name), bounds)) for mode in modes}


def compared_configurations(found: Sequence[Configuration]) -> list[Json]:
    """What the finished runs of each measured, with intervals over seeds, and its difference from the first one, as
    JSON values. Raises ConfigError for a run that is there twice, for runs with different versions of a class of one's
    own, and where runs of one seed were measured on different tasks."""
    for other, own in combinations(found, 2):
        _check_apart(other, own)
    first = found[0]
    places = {run.path.resolve() for each in found for run in each.runs.values()}
    names_tell = len({each.name for each in places}) == len(places)
    shared = os.path.commonpath(each.parent for each in places)
    modes = dict.fromkeys(mode for each in found for mode in each.modes)
    means, differences = bounds_of([reward for each in found for reward in each.rewards])
    rows: list[Json] = []
    for each in found:
        paths = [run.path for run in each.runs.values()]
        place = paths[0].resolve()
        label = place.name if names_tell else str(place.relative_to(shared))
        label += f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        row: Json = {"label": label, "runs": [*map(str, paths)], "seeds": [*each.runs]}
        changes = changed_settings(first.settings, each.settings).items()
        row["settings"] = _changes(shown({k: values for k, values in changes if not k.startswith(NO_SETTINGS)}))
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


def _check_apart(first: Configuration, other: Configuration) -> None:
    if first.key != other.key:
        return
    known, (own_seed, run) = next(iter(first.runs.values())), next(iter(other.runs.items()))
    if changed := sorted({name for name, _ in first.extensions.items() ^ other.extensions.items()}):
        raise ConfigError(f"{run.path} was trained with another version of {', '.join(changed)} than {known.path}")
    known = first.runs.get(own_seed, known)
    raise ConfigError(f"{known.path} and {run.path} are one configuration with one seed ({own_seed}); leave one out")


def _check_tasks(first: Configuration, other: Configuration) -> None:
    for seed in first.reports.keys() & other.reports.keys():
        runs = first.runs[seed], other.runs[seed]
        if runs[0].tasks("held_out") != runs[1].tasks("held_out"):
            raise ConfigError(
                f"{runs[0].path} and {runs[1].path} were measured on different held-out tasks; compare equal ones"
            )
