"""Reads the files of a run directory, which another process may be writing. Each is read again when it has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from agentlightning.config import TrainConfig
from agentlightning.errors import AgentLightningError
from agentlightning.training.governance import AUDIT_FILE, AuditRecord, read_audit
from agentlightning.training.health.examination import read_records, status_of
from agentlightning.training.health.signs import SignHistory, sign_history
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.run_changes import flat_settings, settings_of_run
from agentlightning.training.persistence.run_dir import RunState, check_run, read_state, whole_lines
from agentlightning.util.json_values import Json

T = TypeVar("T")
Signature = tuple[int, int] | None
"""(time of the last change in nanoseconds, size in bytes) of a file; None: there is none."""


@dataclass(slots=True)
class RunFiles:
    """The files of one run directory."""

    path: Path
    _cache: dict[str, tuple[Signature, Any]] = field(default_factory=dict[str, tuple[Signature, Any]])

    def state(self) -> RunState:
        """Raises ResumeError where it cannot be read."""
        return self._read("state", "state.json", lambda: read_state(self.path))

    def status(self) -> Literal["running", "finished", "unfinished"]:
        """unfinished: no process has the run open, and there is no report."""
        return status_of(self.path)

    def metrics(self) -> list[Json]:
        """The lines of `metrics.jsonl` that can be read."""
        return self._read("metrics", "metrics.jsonl", lambda: _json_lines(self.path / "metrics.jsonl"))

    def records(self) -> list[StepRecord]:
        return self._read("records", "metrics.jsonl", lambda: read_records(self.path / "metrics.jsonl")[0])

    def signs(self) -> list[SignHistory]:
        """The signs of trouble since which step. Takes seconds for a run of thousands of steps: call it in a thread."""
        return self._read("signs", "metrics.jsonl", lambda: sign_history(self.records()))

    def report(self) -> Json | None:
        """The result; None for a run that has none yet."""
        return self._read("report", "report.json", lambda: _json_or_none(self.path / "report.json"))

    def config(self) -> TrainConfig | None:
        """The settings; None where there are none, or this version cannot read them (`config_error`)."""
        return self._config()[0]

    def config_error(self) -> str:
        """Why there are no settings."""
        return self._config()[1]

    def settings(self) -> Json:
        """The settings by their full names in order, without secrets."""
        config = self.config()
        return {} if config is None else dict(sorted(flat_settings(config).items()))

    def audit(self) -> list[AuditRecord]:
        return self._read("audit", AUDIT_FILE, lambda: read_audit(self.path))

    def changes(self) -> list[Json]:
        """What resumes have changed."""
        return self._read("changes", "changes.jsonl", lambda: _json_lines(self.path / "changes.jsonl"))

    def tasks(self, name: str) -> list[Any]:
        """The tasks of `train`, `validation` or `held_out`."""
        file = f"data/{name}.jsonl"
        return self._read(f"tasks {name}", file, lambda: _json_lines(self.path / file))

    def learned_at(self, rollout_id: str) -> int | None:
        """The step that was given a rollout to learn from; None: none was, or the audit log does not say."""
        return next((each.step for each in self._learned() if rollout_id in each.rollouts), None)

    def learned_by(self, step: int) -> tuple[str, ...] | None:
        """The rollouts that a step was given to learn from; None where the audit log does not say."""
        return next((each.rollouts for each in self._learned() if each.step == step), None)

    def _learned(self) -> Iterator[AuditRecord]:
        """The updates, the last one first."""
        return (each for each in reversed(self.audit()) if each.action == "learned")

    def signature(self) -> str:
        """Changes whenever the metrics, the state or the report do."""
        return repr([self._signature(name) for name in ("metrics.jsonl", "state.json", "report.json")])

    def _config(self) -> tuple[TrainConfig | None, str]:
        return self._read("config", "config.toml", self._load_config)

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

    def _read(self, key: str, name: str, read: Callable[[], T]) -> T:
        signature = self._signature(name)
        known = self._cache.get(key)
        if known is not None and known[0] == signature:
            return known[1]
        value = read()
        self._cache[key] = (signature, value)
        return value


def open_run(path: Path) -> RunFiles:
    """Raises ConfigError where there is no run."""
    check_run(path)
    return RunFiles(path)


def _json_lines(path: Path) -> list[Any]:
    """The lines that can be read; one without an end is being written."""
    found: list[Any] = []
    for line in whole_lines(path):
        try:
            found.append(orjson.loads(line))
        except orjson.JSONDecodeError:  # `damaged_lines` of the examination names it
            continue
    return found


def _json_or_none(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
