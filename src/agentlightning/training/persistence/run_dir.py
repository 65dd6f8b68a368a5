"""The run directory: everything a run knows, in one place, so that it continues from any crash.

    config.toml        the resolved configuration
    data/              the tasks: train.jsonl, validation.jsonl, held_out.jsonl
    store.db           rollouts, attempts, spans, resources
    start/             the starting policy (after the warm start)
    checkpoints/       step-000012/ ...: weights and training state; the last ones and the best are kept
    state.json         where the run is; written last, atomically: a crash leaves the old one
    metrics.jsonl      one line for each step
    changes.jsonl      one line for each resume that changed settings
    curve.png, report.json, checkpoint/    what comes out at the end

A checkpoint exists for the run only once `state.json` names it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import orjson

from agentlightning.errors import ConfigError, ResumeError
from agentlightning.util.file_lock import lock_file

STATE_VERSION = 1


@dataclass(slots=True)
class RunState:
    """Where a run is."""

    run_id: str
    algorithm: str | None = None
    """`module:Class` of the algorithm object the run was given; None: made from its settings."""
    objects: list[str] = field(default_factory=list[str])
    """Of agent, reward and store, those that were live objects: no setting names them."""
    step: int = 0
    """Optimiser steps of the algorithm done."""
    rollouts: int = 0
    """Rollouts accounted for in training, the failed ones included."""
    failed_rollouts: int = 0
    rejected: dict[str, int] = field(default_factory=dict[str, int])
    """Rollouts that succeeded and could not be used, by reason."""
    skipped_groups: int = 0
    warnings: dict[str, str] = field(default_factory=dict[str, str])
    """What was warned of, by kind."""
    checkpoint: str | None = None
    """Directory, relative to the run's, of the weights and training state after `step`."""
    best_step: int | None = None
    best_score: float | None = None
    best_checkpoint: str | None = None
    evaluations: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """Rewards of each evaluation that is finished, by name."""
    reasons: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Why tasks of these evaluations have no reward, with how many each."""
    measured_step: int | None = None
    """The step whose weights the evaluations `after-<mode>` measured."""
    revision: int = 0
    """How often the run was resumed with another agent, reward or weights of rewards."""
    seconds: float = 0.0
    """Time spent in this run so far, interruptions not counted."""
    version: int = STATE_VERSION

    @property
    def suffix(self) -> str:
        """What the names of rollouts end with, so that those of an earlier revision are not taken for them."""
        return f"-changed{self.revision}" if self.revision else ""

    def measures_start(self, modes: Iterable[str]) -> bool:
        """Whether the starting policy is still to be measured."""
        return any(f"before-{mode}" not in self.evaluations for mode in modes)

    def forget_measurements(self) -> None:
        """After a change of what rewards mean: everything is measured again, and the best checkpoint chosen anew."""
        self.revision += 1
        self.evaluations.clear()
        self.reasons.clear()
        self.measured_step = self.best_step = self.best_score = self.best_checkpoint = None


def rollouts_in_use(run_dir: Path) -> tuple[str, ...]:
    """What the ids of the rollouts begin with that the run in a directory may still ask for: those of the step under
    way, and of its evaluations. Empty where there is no run, or it is finished."""
    try:
        state = RunState(**orjson.loads((run_dir / "state.json").read_bytes()))
    except (OSError, TypeError, ValueError):
        return ()
    if (run_dir / "report.json").exists() and not is_locked(run_dir):
        return ()
    steps = (
        f"train-{state.step:06d}",
        f"validation-{state.step + 1:06d}",
        f"evaluation-{state.step:06d}",
        "before-",
        "after-",
    )
    return tuple(f"{state.run_id}-{purpose}" for purpose in steps)


def is_locked(run_dir: Path) -> bool:
    """Whether a process has the run open."""
    try:
        with (run_dir / "lock").open("r") as file:
            return not lock_file(file.fileno(), shared=True)
    except OSError:
        return False


class RunDir:
    """One run's directory; locked against a second process while open."""

    def __init__(self, path: Path, lock: IO[str], others: Collection[Path] = (), made: Sequence[Path] = ()) -> None:
        self.path = path
        self._lock = lock
        self._others = others
        """What was in the directory before there was a run."""
        self._made = made
        """Directories that were made for it, the deepest first."""

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """A new run. Raises ConfigError where one is already, or nothing can be written."""
        if (path / "state.json").exists():
            raise ConfigError(f"{path} already holds a run; continue it with --resume {path}, or use another --run-dir")
        made = [each for each in (path, *path.parents) if not each.exists()]
        with _writable(path):
            path.mkdir(parents=True, exist_ok=True)
            others = frozenset(path.iterdir())
            return cls(path, _lock(path), others, made)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run. Raises ResumeError where there is none."""
        if not (path / "state.json").exists():
            raise ResumeError(f"{path} holds no run to resume: {path / 'state.json'} does not exist")
        with _writable(path):
            run_dir = cls(path, _lock(path))
            for folder in (path, path / "checkpoints"):
                _remove_unfinished(folder)
            return run_dir

    def close(self) -> None:
        self._lock.close()

    def discard(self) -> None:
        """Remove a run that was just created and did not begin; what was there before stays."""
        for entry in set(self.path.iterdir()) - set(self._others):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        for directory in self._made:
            if not any(directory.iterdir()):
                directory.rmdir()

    @property
    def store_path(self) -> Path:
        return self.path / "store.db"

    @property
    def start(self) -> Path:
        return self.path / "start"

    def data(self, name: str) -> Path:
        return self.path / "data" / f"{name}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    # -- state -----------------------------------------------------------------------------------------------------

    def read_state(self) -> RunState:
        try:
            record = orjson.loads((self.path / "state.json").read_bytes())
            state = RunState(**record)
        except (OSError, orjson.JSONDecodeError, TypeError) as error:
            raise ResumeError(f"{self.path / 'state.json'} cannot be read: {error}; start a new run") from error
        if state.version != STATE_VERSION:
            raise ResumeError(f"{self.path} was written by another version (state {state.version}); use that version")
        return state

    def write_state(self, state: RunState) -> None:
        write_atomically(self.path / "state.json", orjson.dumps(state, option=orjson.OPT_INDENT_2))

    def prune_checkpoints(self, state: RunState, keep: int) -> None:
        """Remove all but the `keep` newest checkpoints, the current one and the best."""
        folder = self.path / "checkpoints"
        named = {Path(name).name for name in (state.checkpoint, state.best_checkpoint) if name}
        found = sorted(entry for entry in folder.glob("step-*") if entry.is_dir())
        for entry in found[: max(0, len(found) - keep)]:
            if entry.name not in named:
                shutil.rmtree(entry)

    # -- metrics ---------------------------------------------------------------------------------------------------

    def read_metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        whole_lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
        return [orjson.loads(line) for line in whole_lines]

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("ab") as file:
            file.write(orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def append_changes(self, line: bytes) -> None:
        """Keep what a resume changed."""
        with (self.path / "changes.jsonl").open("ab") as file:
            file.write(line)

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps that will be done again."""
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        write_atomically(self.path / "metrics.jsonl", b"".join(orjson.dumps(record) + b"\n" for record in kept))


@contextmanager
def _writable(path: Path) -> Generator[None]:
    """A refusal of the file system to write to a run directory, as an error that names it; a full disk stays one."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise ConfigError(f"{path} is no directory, or lies in a file; give another --run-dir") from error
        raise ConfigError(f"{path} cannot be written to ({error.strerror}); give another --run-dir") from error


def _lock(path: Path) -> IO[str]:
    file = (path / "lock").open("w")
    if not lock_file(file.fileno()):
        file.close()
        raise ConfigError(f"{path} is in use by another process; wait for it or end it first")
    return file


_UNFINISHED_FOLDER: Final = re.compile(r"\.(.+)\.[a-z0-9_]{8}")
_UNFINISHED_FILE: Final = re.compile(r"\..+\.\d+")


def _remove_unfinished(folder: Path) -> None:
    """What a process that was killed had not finished writing: files of `write_atomically`, and checkpoints, of which
    the one that was about to be replaced is put back where it was moved aside already."""
    for entry in folder.glob(".*"):
        unfinished = _UNFINISHED_FOLDER.fullmatch(entry.name)
        if unfinished and entry.is_dir() and {part.name for part in entry.iterdir()} <= {"new", "old"}:
            replaced = folder / unfinished[1]
            if (entry / "old").is_dir() and not replaced.exists():
                (entry / "old").rename(replaced)
            shutil.rmtree(entry)
        elif _UNFINISHED_FILE.fullmatch(entry.name) and entry.is_file():
            entry.unlink()


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Either the old content or the new is there, whatever happens. `private`: nobody else may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        if private and hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
