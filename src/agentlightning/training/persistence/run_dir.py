"""The run directory: all that a run needs to continue after any crash.

    config.toml        the resolved configuration
    data/              the tasks: train.jsonl, validation.jsonl, held_out.jsonl
    store.db           rollouts, attempts, spans, resources
    start/             the starting policy (after the warm start)
    reference/         a copy of it, if a loss needs one and it has no directory of its own
    checkpoints/       step-000012/ ...: weights, training state, published resources; the last ones and the best
    state.json         the run's position; written last and atomically, so a crash leaves the old one
    metrics.jsonl      one line for each step
    changes.jsonl      one line for each resume that changed settings
    error.txt          the error that ended the run, until it is resumed
    ratios/            step-000012.jsonl ...: ratios of the tokens of each update, if `run.token_ratios` asks for them
    audit.jsonl        one line for each version: what it learned from, its scores, the gate's decision
    curve.png, report.json, checkpoint/    the results

A checkpoint counts only once `state.json` names it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import statistics
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, Literal, TypedDict, cast

import msgspec
import orjson
from msgspec import Struct
from pydantic import BaseModel

from agentlightning.algorithms.base import ALGORITHMS
from agentlightning.config import CALLBACKS, HOOKS, TRACKERS, TrainConfig
from agentlightning.credit.base import RULES
from agentlightning.engine.servers.config import ENGINES
from agentlightning.errors import AgentLightningError, ConfigError, DatasetError, ResumeError
from agentlightning.policy.config import BACKENDS
from agentlightning.policy.losses import LOSSES
from agentlightning.runner.agents.agent import REWARDS
from agentlightning.task import Overlap, load_dataset, overlaps, split, task_key
from agentlightning.util.file_lock import lock_file
from agentlightning.util.json_values import dumps, loads
from agentlightning.util.plugins import Registry, file_of
from agentlightning.util.settings import NONE, is_secret, load_settings

ALGORITHM_FILE = "algorithm.json"
"""In a checkpoint: `Algorithm.state_dict`, unless it is empty, and the revision of the run that it belongs to."""
ERROR_FILE = "error.txt"
STATE_VERSION = 2


class KeptCheckpoint(TypedDict):
    """A checkpoint that is kept to return to."""

    directory: str
    """Relative to the run's."""
    step: int
    version: int | None
    """Of the weights in it."""


class StageRecord(TypedDict):
    """A stage that has begun, of a run of several algorithms."""

    name: str
    """That of its algorithm."""
    first_step: int
    """The steps of the run before it."""
    rollouts: int
    """The rollouts of the run before it."""
    learns_weights: bool
    settings: str
    """Tells its settings from others."""


class RecordedData(Struct):
    """What a run on recorded data learns from, and how far it is in it."""

    given: list[str] = []
    """The settings of an algorithm object that were set: its own loss stays, even if it is the default."""
    sources: dict[str, Any] = {}
    """`dataset`: the query of the store that supervised learning was given."""
    rollouts: list[str] | None = None
    """The sessions that the store held when the run began. None: the run follows the store, or reads none."""
    method: Literal["importance", "awr", "rejection"] | None = None
    first_step: int = 0
    """Steps of an earlier call of `train` in the same directory."""
    source: dict[str, Any] = {}
    """The position in the data."""
    rejected: dict[str, str] = {}
    """Sessions that could not be used, with the reason."""
    left_out: dict[str, int] = {}
    """Sessions that were not chosen, by reason."""
    sessions: int = 0
    """What was learned from."""
    notes: list[str] = []


MEMORY = 0.5
"""The weight of a new group in the moving averages of its task."""
FORGOTTEN = 0.25
"""A mean this far below the best one, relative to it, counts as forgotten."""


class TaskRecord(Struct, array_like=True):
    """What the order of tasks knows of one task, as a list in `state.json`."""

    turn: float = 0
    """When it was drawn last."""
    groups: float = 0
    mean: float = 0.0
    std: float = 0.0
    best: float = 0.0
    unrewarded: float = 0
    """Groups without any reward."""

    @property
    def score(self) -> float:
        return self.std + max(0.0, self.best - self.mean)

    @property
    def is_forgotten(self) -> bool:
        return self.groups > 1 and self.best - self.mean > FORGOTTEN * max(abs(self.best), 1e-9)

    def add(self, rewards: Sequence[float]) -> None:
        if not rewards:
            self.unrewarded += 1
            return
        mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
        weight = MEMORY if self.groups else 1.0
        self.mean += weight * (mean - self.mean)
        self.std += weight * (std - self.std)
        self.best = max(self.best, self.mean) if self.groups else mean
        self.groups += 1


class RunState(Struct):
    """The position of a run, as `state.json` holds it."""

    run_id: str
    algorithm: str | None = None
    """`module:Class` of the algorithm object that the run was given. None: it is made from the settings."""
    objects: list[str] = []
    """Which of agent, reward and store were live objects, which no setting names."""
    extensions: dict[str, dict[str, str]] = {}
    """The classes of others that settings name, as `SETTING=NAME`: the file of each, and its digest."""
    learns_weights: bool = True
    """Whether the algorithm trains a model, which its rollouts then have to call."""
    step: int = 0
    """Finished steps of the algorithm."""
    rollouts: int = 0
    """Training rollouts, the failed ones included."""
    failed_rollouts: int = 0
    rejected: dict[str, int] = {}
    """Training rollouts that succeeded and could not be used, by reason."""
    skipped_groups: int = 0
    warnings: dict[str, str] = {}
    """Warnings by kind."""
    warning_counts: dict[str, int] = {}
    """The number of steps at which each kind was found."""
    checkpoint: str | None = None
    """The directory, relative to the run's, of the checkpoint after `step`."""
    checkpoint_version: int | None = None
    """The version of the weights in it."""
    resumes: list[list[int]] = []
    """(version in the checkpoint, version of the same weights since) of each resume and each return to a checkpoint."""
    first_turn: int | None = None
    """The first turn of the tasks of which a group is still to be learned from. None: that of the current step."""
    turns: int = 0
    """The number of turns of which rollouts were started."""
    taken: dict[str, int] = {}
    """Group -> the step that learned from it, for the groups of turns that are not finished."""
    curriculum: dict[int, TaskRecord] = {}
    """By the place of each task, if tasks are drawn by what can be learned from them."""
    turn_tasks: dict[str, list[int]] = {}
    """The tasks of each turn that is not finished, where their order depends on rewards."""
    stages: list[StageRecord] = []
    """Those that have begun, in a run of several algorithms; the last one is the present one."""
    best_step: int | None = None
    best_score: float | None = None
    best_checkpoint: str | None = None
    best_version: int | None = None
    """The version of the weights in it."""
    evaluations: dict[str, list[float | None]] = {}
    """The rewards of each finished evaluation, by name."""
    reasons: dict[str, dict[str, int]] = {}
    """The number of tasks without a reward in these evaluations, by reason."""
    measured_step: int | None = None
    """The step whose weights the evaluations `after-<mode>` have measured."""
    revision: int = 0
    """The number of resumes with another agent, reward or reward weights."""
    seconds: float = 0.0
    """Time spent on the run so far, without interruptions."""
    recorded: RecordedData | None = None
    """None: an agent runs."""
    callbacks: dict[str, dict[str, Any]] = {}
    """The state of each callback, by its name."""
    version: int = STATE_VERSION

    def of(self, callback: str) -> Mapping[str, Any]:
        """The state of a callback; empty where the run has none of that name."""
        return self.callbacks.get(callback, {})

    @property
    def rollbacks(self) -> int:
        """The number of returns to a healthy checkpoint."""
        return self.of("health").get("rollbacks", 0)

    @property
    def kept(self) -> dict[str, KeptCheckpoint]:
        """The checkpoints that callbacks keep to return to: `healthy`, `candidate`, `promoted`."""
        names = KeptCheckpoint.__annotations__.keys()
        parts: list[tuple[str, Any]] = [part for table in self.callbacks.values() for part in table.items()]
        found: Any = {name: part for name, part in parts if isinstance(part, dict) and part.keys() == names}
        return found

    @property
    def suffix(self) -> str:
        """The end of rollout ids, which tells the revisions of a run apart."""
        return f"-changed{self.revision}" if self.revision else ""

    @property
    def first_step(self) -> int:
        """The finished steps of earlier stages, or of an earlier run on recorded data in the directory."""
        if self.stages:
            return self.stages[-1]["first_step"]
        return self.recorded.first_step if self.recorded is not None else 0

    @property
    def stage_step(self) -> int:
        """The finished steps of the present stage; of the run, where it has one algorithm."""
        return self.step - self.first_step

    @property
    def may_have_learned(self) -> bool:
        """Whether the weights may have been updated: a step was done by something that learns them."""
        if not self.stages:
            return self.stage_step > 0
        learning = next((each for each in self.stages if each["learns_weights"]), None)
        return learning is not None and self.step > learning["first_step"]

    def begin_stage(self, record: StageRecord) -> None:
        """Begin a stage: its best checkpoint is chosen among its own steps."""
        self.stages.append(record)
        self.best_step = self.best_score = self.best_checkpoint = None
        self.evaluations = {name: each for name, each in self.evaluations.items() if not name.startswith("best-")}

    def step_name(self, step: int) -> str:
        """The name of the resources of the step after `step` finished ones, and the beginning of its rollouts' ids,
        which count from 1 as steps do."""
        return f"{self.run_id}-train-{step + 1:06d}"

    def measures_start(self, modes: Iterable[str]) -> bool:
        """Whether the starting policy is still to be measured."""
        return any(f"before-{mode}" not in self.evaluations for mode in modes)

    def forget_measurements(self) -> None:
        """After a change of what rewards mean: measure everything and choose the best checkpoint again."""
        self.revision += 1
        self.evaluations.clear()
        self.reasons.clear()
        self.measured_step = self.best_step = self.best_score = self.best_checkpoint = None


def rollouts_in_use(run_dir: Path) -> tuple[str, ...]:
    """Prefixes of the ids of rollouts that the run in a directory may still need: those that the current step or a
    later one learns from, those of the step's evaluations, and those that may be replayed. Empty if there is no run or
    it is finished."""
    try:
        state = read_state(run_dir)
    except ResumeError:
        return ()
    if (run_dir / "report.json").exists() and not is_locked(run_dir):
        return ()
    first = state.step if state.first_turn is None else state.first_turn
    steps = (
        *(f"train-{turn + 1:06d}" for turn in range(first, max(state.step + 1, state.turns))),
        f"validation-{state.step + 1:06d}",
        f"evaluation-{state.step + 1:06d}",
        f"trial-{state.step + 1:06d}",
        f"guard-{state.step:06d}",
        f"guard-{state.step + 1:06d}",
        "before-",
        "stage-",
        "after-",
    )
    replayed: list[str] = []  # Those that the last checkpoint keeps for replay.
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        learned = orjson.loads((run_dir / (state.checkpoint or "") / ALGORITHM_FILE).read_bytes())["state"]
        learned = learned.get("state", learned)  # Of the present stage, where there are several.
        replayed = [str(each) for ids in learned.get("replay", {}).values() for each in ids]
    return (*(f"{state.run_id}-{purpose}" for purpose in steps), *replayed)


def read_state(run_dir: Path) -> RunState:
    """The state of the run in a directory, which another process may have open. Raises ResumeError where it cannot be
    read."""
    path = run_dir / "state.json"
    with readable(path):
        state = msgspec.json.decode(path.read_bytes(), type=RunState)
    if not 1 <= state.version <= STATE_VERSION:
        raise ResumeError(f"{run_dir} was written by another version (state {state.version}); use that version")
    state.version = STATE_VERSION
    return state


@contextmanager
def readable(part: object) -> Generator[None]:
    """Turn what goes wrong while a part of a run is read into a ResumeError that names it."""
    try:
        yield
    except (OSError, AttributeError, LookupError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise ResumeError(f"{part} cannot be read: {error}; start a new run") from error


def holds_run(run_dir: Path) -> bool:
    """Whether there is a run in a directory."""
    return (run_dir / "state.json").exists()


def check_run(path: Path) -> None:
    """Raises ConfigError where a directory holds no run."""
    if not path.is_dir():
        raise ConfigError(f"{path} holds no run: it is no directory; give that of a run, such as runs/20260101-120000")
    if not holds_run(path):
        raise ConfigError(f"{path} holds no run: there is no state.json in it; give the directory of a run")


def unfinished(run_dir: Path) -> str:
    """Why a run has no result yet, and what to do."""
    if is_locked(run_dir):
        return f"the run is in progress; wait for its end (agl status {run_dir})"
    return f"the run is not finished; finish it with agl train --resume {run_dir}"


def is_locked(run_dir: Path) -> bool:
    """Whether a process has the run open."""
    try:
        with (run_dir / "lock").open("r") as file:
            return not lock_file(file.fileno(), shared=True)
    except OSError:
        return False


class RunDir(Struct):
    """One run's directory; locked against a second process while open."""

    path: Path
    _lock: IO[str]
    _earlier: frozenset[Path] = frozenset()
    """The contents of the directory before the run."""
    _made: Sequence[Path] = ()
    """Directories that were made for the run, the deepest first."""

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """A new run. Raises ConfigError where one is already, or nothing can be written."""
        if holds_run(path):
            raise ConfigError(f"{path} already holds a run; continue it with --resume {path}, or use another --run")
        made = [each for each in (path, *path.parents) if not each.exists()]
        with _writable(path):
            path.mkdir(parents=True, exist_ok=True)
            earlier = frozenset(path.iterdir())
            return cls(path, _lock(path), earlier, made)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run. Raises ResumeError where there is none."""
        if not holds_run(path):
            raise ResumeError(f"{path} holds no run to resume: {path / 'state.json'} does not exist")
        with _writable(path):
            run_dir = cls(path, _lock(path))
            for folder in (path, path / "checkpoints"):
                _remove_unfinished(folder)
            for name in GROWING:
                _end_last_line(path / name)
            (path / ERROR_FILE).unlink(missing_ok=True)
            return run_dir

    def close(self) -> None:
        self._lock.close()

    def discard(self) -> None:
        """Remove a run that was just created and has not started. Earlier contents of the directory stay."""
        for entry in set(self.path.iterdir()) - self._earlier:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        for directory in self._made:
            if not any(directory.iterdir()):
                directory.rmdir()

    @property
    def start(self) -> Path:
        return self.path / "start"

    @property
    def reference(self) -> Path:
        return self.path / "reference"

    def data(self, name: str) -> Path:
        return self.path / "data" / f"{name}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    def write_error(self, error: Exception) -> None:
        """Keep the error that ends the run, unless the run was discarded or the disk takes no more."""
        if holds_run(self.path):
            text = str(error) if isinstance(error, AgentLightningError) else f"{type(error).__name__}: {error}"
            with suppress(OSError):
                write_atomically(self.path / ERROR_FILE, text.encode(errors="replace"), private=True)

    # -- state -----------------------------------------------------------------------------------------------------

    def write_state(self, state: RunState) -> None:
        write_atomically(self.path / "state.json", msgspec.json.format(msgspec.json.encode(state)))

    def prune_checkpoints(self, state: RunState, keep: int) -> None:
        """Remove all but the `keep` newest checkpoints, the current one, the best, and those to return to."""
        folder = self.path / "checkpoints"
        kept = [each["directory"] for each in state.kept.values()]
        named = {Path(name).name for name in (state.checkpoint, state.best_checkpoint, *kept) if name}
        found = sorted(entry for entry in folder.glob("step-*") if entry.is_dir())
        for entry in found[:-keep]:
            if entry.name not in named:
                shutil.rmtree(entry)

    # -- metrics ---------------------------------------------------------------------------------------------------

    def read_metrics(self) -> list[dict[str, Any]]:
        return records_in(self.path / "metrics.jsonl")


def append_lines(path: Path, *records: Mapping[str, Any]) -> None:
    """Add records to a file of JSON lines."""
    with path.open("ab") as file:
        file.writelines(orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for each in records)


def whole_lines(path: Path) -> list[bytes]:
    """Those of a file, but for a last one that a crash cut off; none where there is no file."""
    return path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []


def records_in(path: Path) -> list[dict[str, Any]]:
    """Those in the whole lines of a file. Raises ResumeError, which names a line that cannot be read."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(whole_lines(path), 1):
        try:
            found.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise ResumeError(f"line {number} of {path} cannot be read: {error}; remove that line") from error
    return found


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will be repeated, and a last one that was cut off. Raises as `records_in`."""
    kept = [each for each in records_in(path) if each["step"] <= step]
    write_atomically(path, b"".join(orjson.dumps(each) + b"\n" for each in kept))


@contextmanager
def _writable(path: Path) -> Generator[None]:
    """Turn errors of the file system into a ConfigError that names the run directory, except for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise ConfigError(f"{path} is no directory, or lies in a file; give another --run") from error
        raise ConfigError(f"{path} cannot be written to ({error.strerror}); give another --run") from error


def _lock(path: Path) -> IO[str]:
    file = (path / "lock").open("w")
    if not lock_file(file.fileno()):
        file.close()
        raise ConfigError(f"{path} is in use by another process; wait for it or end it first")
    return file


_UNFINISHED_FOLDER = re.compile(r"\.(.+)\.[a-z0-9_]{8}")
_UNFINISHED_FILE = re.compile(r"\..+\.\d+")


def _remove_unfinished(folder: Path) -> None:
    """Remove what a killed process had not finished writing: files of `write_atomically`, and checkpoints. A checkpoint
    that was about to be replaced is put back."""
    for entry in folder.glob(".*"):
        unfinished = _UNFINISHED_FOLDER.fullmatch(entry.name)
        if unfinished and entry.is_dir() and {part.name for part in entry.iterdir()} <= {"new", "old"}:
            replaced = folder / unfinished[1]
            if (entry / "old").is_dir() and not replaced.exists():
                (entry / "old").rename(replaced)
            shutil.rmtree(entry)
        elif _UNFINISHED_FILE.fullmatch(entry.name) and entry.is_file():
            entry.unlink()


GROWING = ("metrics.jsonl", "changes.jsonl", "audit.jsonl", "transcripts.jsonl")
"""Files to which lines are added."""


def _end_last_line(path: Path) -> None:
    """Remove a last line that was not written to its end, or end one that lacks only that, so that the next one does
    not follow in the same line."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        last = file.read().rpartition(b"\n")[2]
        try:
            orjson.loads(last)
            file.write(b"\n")
        except orjson.JSONDecodeError:
            file.truncate(file.tell() - len(last))


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace a file, so that a crash leaves the old content or the new. `private`: only the owner may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        if private and hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# -- tasks -----------------------------------------------------------------------------------------------------------

# The tasks of a run: loaded, split into disjoint parts, and stored in the run directory.

PARTS = ("train", "validation", "held_out")


class Tasks(Struct):
    """The tasks of a run. Parts that are split off share none."""

    train: list[Any]
    validation: list[Any] = []
    """To choose the best checkpoint by."""
    held_out: list[Any] = []
    """To measure the gain on."""

    def shared(self) -> list[Overlap]:
        """The tasks that are in several parts, which only parts that were given can have in common."""
        return overlaps({part: getattr(self, part) for part in PARTS})


def load_tasks(
    config: TrainConfig, train: Sequence[Any] | None, validation: Sequence[Any] | None, held_out: Sequence[Any] | None
) -> Tasks:
    """The given tasks, or those that the configuration names. Missing parts are split off the training tasks."""
    data = config.data
    source = train if train is not None else data.train
    if source is None:
        raise ConfigError("no tasks: pass train_dataset to fit(), or set data.train (--data FILE)")
    given, others = load_dataset(source), (validation or data.validation, held_out or data.held_out)
    own = [[] if other is None else load_dataset(other) for other in others]
    shares = [
        0.0 if part else share for part, share in zip(own, (data.validation_share, data.held_out_share), strict=True)
    ]
    parts = split(given, [1.0 - sum(shares), *shares], config.run.seed) if any(shares) else [given, *own]
    tasks = Tasks(parts[0], own[0] or parts[1], own[1] or parts[2])
    for part in ("train", "held_out"):
        if not getattr(tasks, part):
            raise DatasetError(
                f"no {part} task is left after splitting {_counted(given)}; give more tasks, a file of its own"
                f" (data.{part}), or other shares (data.validation_share, data.held_out_share)"
            )
    return tasks


def _counted(tasks: Sequence[Any]) -> str:
    different = len({task_key(task) for task in tasks})
    same = "" if different == len(tasks) else f", of which {different} differ (equal tasks stay in one part)"
    return f"{len(tasks)} task{'' if len(tasks) == 1 else 's'}{same}"


def write_tasks(run_dir: RunDir, tasks: Tasks) -> None:
    """Store the tasks in the run directory."""
    run_dir.data("train").parent.mkdir(exist_ok=True)
    for part in PARTS:
        lines = b"".join(dumps(task) + b"\n" for task in getattr(tasks, part))
        write_atomically(run_dir.data(part), lines)


def read_tasks(run_dir: RunDir) -> Tasks:
    """The tasks that a run was started with. Raises ResumeError where they cannot be read."""
    with readable(f"the tasks of {run_dir.path}"):
        return Tasks(*([loads(line) for line in run_dir.data(part).read_bytes().splitlines()] for part in PARTS))


# -- settings --------------------------------------------------------------------------------------------------------

# The settings of a run, and their changes when it is resumed.
#
# What a run consists of (its model, its tasks, its seed, how it is measured) is fixed. How its agent is run, how fast
# it learns and for how long may change.

CHANGEABLE = (
    "agent",
    "data.follow_timeout",
    "reward",
    "group_reward",
    "algorithm.steps",
    "algorithm.temperature",
    "algorithm.top_p",
    "algorithm.top_k",
    "air",
    "algorithm.credit",
    "algorithm.normalization",
    "algorithm.agent_rewards",
    "algorithm.aggregate",
    "algorithm.loss",
    "algorithm.mismatch",
    "algorithm.proximal",
    "algorithm.reference",
    "algorithm.teacher",
    "algorithm.feedback",
    "algorithm.kl_in_reward",
    "algorithm.overlong",
    "algorithm.truncated_reward",
    "algorithm.mask_truncated",
    "algorithm.dynamic_sampling",
    "algorithm.replay",
    "algorithm.keep_groups",
    "algorithm.timeout_reward",
    "algorithm.minibatches",
    "algorithm.reward_weights",
    "algorithm.target_agent",
    "algorithm.critic",
    "algorithm.editor",
    "algorithm.budget",
    "algorithm.rounds",
    "algorithm.patience",
    "algorithm.optimizer.lr",
    "algorithm.optimizer.muon_lr",
    "algorithm.optimizer.clip_norm",
    "algorithm.optimizer.schedule",
    "algorithm.optimizer.warmup_steps",
    "curriculum",
    "runner",
    "gateway",
    "guard",
    "gate.every",
    "gate.margin",
    "gate.confidence",
    "gate.on_loss",
    "evaluation.every",
    "run.callbacks",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.max_staleness",
    "run.on_collapse",
    "run.max_rollbacks",
    "run.rollback_lr_factor",
    "run.host",
    "run.port",
    "policy.device",
    "policy.threads",
    "policy.max_batch_size",
    "policy.max_kept_tokens",
    "policy.max_context",
    "policy.tool_calls",
    "policy.token_budget",
    "policy.gradient_checkpointing",
    "policy.in_flight",
    "policy.drain_seconds",
    "policy.processes",
    "policy.rank_timeout_seconds",
    "policy.engine",
    "policy.servers",
)
"""Settings, and whole sections, that may change."""

MEASURED = ("agent", "reward", "algorithm.reward_weights")
"""Settings that decide what a reward means: measurements before and after such a change cannot be compared."""

STAGE = re.compile(r"^algorithm\.stages\.\d+\.")
"""The beginning of a setting of one of several algorithms, which may change as that of a single one may."""

Changes = Mapping[str, tuple[Any, Any]]
"""Name of a setting -> (old value, new value)."""


def settings_of_run(run_dir: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """The configuration of a run, with `changes` as given on the command line. Raises ResumeError where there is no
    run."""
    path = run_dir / "config.toml"
    if not path.exists():
        raise ResumeError(f"{run_dir} holds no run: {path} does not exist")
    return load_settings(TrainConfig, toml=path, overrides=changes)


def changed_settings(before: BaseModel, after: BaseModel) -> Changes:
    """The settings that differ."""
    old, new = dict(leaves(before.model_dump(mode="json"))), dict(leaves(after.model_dump(mode="json")))
    names = dict.fromkeys([*old, *new])
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def check_changes(changes: Changes) -> None:
    """Raises ConfigError, with the names, for settings that a run cannot change."""
    fixed = [name for name in changes if not _is_among(name, CHANGEABLE)]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: a resumed run keeps this, as its earlier steps would not fit any more; start a new"
            " run for it. These may change: agent, reward, algorithm.steps, algorithm.optimizer.lr,"
            " algorithm.reward_weights, runner.*, gateway.*, evaluation.every, policy.device, policy.max_context ..."
        )


def changes_rewards(changes: Changes) -> bool:
    """Whether rewards after the changes mean something else than those before."""
    return any(_is_among(name, MEASURED) for name in changes)


def _is_among(name: str, settings: Sequence[str]) -> bool:
    """Whether a setting is one of these, or in a section of these."""
    name = STAGE.sub("algorithm.", name)
    return any(name == each or name.startswith(f"{each}.") for each in settings)


def overrides(changes: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Changes by name, as on the command line: `section.key=value`."""
    if not isinstance(changes, Mapping):
        return list(changes)
    return [f"{name}={NONE if value is None else orjson.dumps(value).decode()}" for name, value in changes.items()]


def describe_changes(changes: Changes) -> str:
    """`algorithm.steps 100 -> 200, runner.hosts 1 -> 2`."""
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())


def shown(changes: Changes) -> Changes:
    """Changes without secrets."""
    hidden = ("...", "...")
    return {
        name: hidden if is_secret(name) else (_without_secrets(old), _without_secrets(new))
        for name, (old, new) in changes.items()
    }


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by full names (`algorithm.steps`)."""
    if isinstance(value, dict) and value:
        for key, inner in cast(dict[str, Any], value).items():
            yield from leaves(inner, f"{prefix}.{key}" if prefix else key)
    elif prefix == "algorithm.stages":
        for place, stage in enumerate(cast("list[Any]", value)):
            yield from leaves(stage, f"{prefix}.{place}")
    else:
        yield prefix, value


def flat_settings(config: TrainConfig) -> dict[str, Any]:
    """Settings by full names (`algorithm.steps`), to be shown; lists as JSON. Secrets are left out."""
    return {
        name: dumps(value).decode() if isinstance(value, list) else value
        for name, value in leaves(_without_secrets(config.model_dump(mode="json")))
    }


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        known = cast(dict[str, Any], value)
        return {name: _without_secrets(inner) for name, inner in known.items() if not is_secret(name)}
    return [_without_secrets(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


# -- extensions ------------------------------------------------------------------------------------------------------

# The classes of others that settings name, by the settings: state.json has the file of each, and what was in it.

SEAMS: Final[Mapping[str, Registry]] = {
    "algorithm": ALGORITHMS,
    "algorithm.credit": RULES,
    "algorithm.loss": LOSSES,
    "policy.engine": ENGINES,
    "policy.kind": BACKENDS,
    "reward": REWARDS,
    "group_reward": REWARDS,
    "run.callbacks": CALLBACKS,
    "runner.hooks": HOOKS,
    "tracking.trackers": TRACKERS,
}


def extensions_of(config: TrainConfig) -> dict[str, dict[str, str]]:
    """By the setting, the name, the file and the digest of that file of each class of others. The file of the agent may
    change, and what else is in it."""
    found: dict[str, dict[str, str]] = {}
    for setting, value in leaves(config.model_dump(mode="json")):
        if (registry := SEAMS.get(STAGE.sub("algorithm.", setting).removesuffix(".type"))) is None:
            continue
        for each in cast("list[Any]", value if isinstance(value, list) else [value]):
            name = each.get("type") if isinstance(each, dict) else each
            if name is None or registry.get(name) is not None:
                continue
            file = file_of(registry.reference(name))
            if file is not None and Path(file).is_file() and file != file_of(config.agent or ""):
                digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
                found[f"{setting}={name}"] = {"file": file, "sha256": digest}
    return found


def check_extensions(run_dir: Path, state: RunState, config: TrainConfig, named: Sequence[str]) -> None:
    """Raises ResumeError for a class of others whose file has changed since the run began, unless a change names it."""
    now = extensions_of(config)
    for each, record in state.extensions.items():
        setting, _, name = each.partition("=")
        chosen = any(f"{setting}.".startswith(f"{text.partition('=')[0].strip()}.") for text in named)
        if each in now and now[each]["sha256"] != record["sha256"] and not chosen:
            raise ResumeError(
                f"{name} of {setting} has changed since the run began: {now[each]['file']}; put back what it was, or go"
                f" on with what it is: --resume {run_dir} {setting}={name}"
            )
    state.extensions = now


OBJECTS = {
    "store": ("keeps its rollouts in a store that was given to it; give it again", "...), or --server URL"),
    "reward": ("was started with a reward function that is an object; give it again", "...), or --reward module:name"),
    "callbacks": ("was started with callbacks that are objects; give them again", "[...])"),
}
"""What no setting names, and how to give it again."""
