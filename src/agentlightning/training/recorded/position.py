"""The position of a run on recorded data, in its run directory, so that a killed run continues there.

config.toml        the settings of the trainer
offline.json       the position; written last and atomically, so that a crash leaves the old one
held_out.jsonl     the tasks that the agent is measured on
checkpoints/       step-000020/ ...: weights and training state at the position
best/              step-000040/: the weights with the lowest validation loss
start/             the starting weights, where they are a reference and in no directory of their own
metrics.jsonl      one line for each step
result.json, checkpoint/    the results
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from agentlightning.algorithms import make_algorithm
from agentlightning.algorithms.base import Algorithm, class_name
from agentlightning.algorithms.lightning_rl import LightningRL, LightningRLConfig
from agentlightning.algorithms.preference import DPO, DPOConfig
from agentlightning.algorithms.recorded.method import forget_all_but
from agentlightning.algorithms.sft import SFTAlgorithm, SFTConfig
from agentlightning.config import TrainConfig
from agentlightning.errors import ResumeError
from agentlightning.store.base import LightningStore
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.training.persistence.run_dir import OFFLINE_FILE, write_atomically
from agentlightning.util.plugins import reference_to
from agentlightning.util.settings import settings_from

BEST: Final = "best"
HELD_OUT_FILE: Final = "held_out.jsonl"
CHECKPOINT_EVERY: Final = 20
"""Updates between checkpoints, unless `run.checkpoint_every` says otherwise: an update costs no rollouts here."""
VERSION: Final = 1
SOURCES: Final = ("dataset", "validation", "data")
"""Attributes of algorithms that hold what they learn from."""


@dataclass(slots=True)
class OfflinePosition:
    """What `offline.json` holds."""

    algorithm: str
    """`module:Class`."""
    settings: dict[str, Any]
    """Of the algorithm, where the trainer's settings do not hold them."""
    given: list[str]
    """The settings of the algorithm that were set: its own loss stays where one was, even if it is the default."""
    sources: dict[str, Any]
    """What the algorithm learns from, where it is a file or a query of the store."""
    options: dict[str, Any]
    model: str
    """The model that the run started from, named as in `PolicyConfig.model`."""
    checkpoint_every: int
    store: str | None = None
    """The file of the store. None: it has none, or nothing is read from it."""
    objects: list[str] = field(default_factory=list[str])
    """What was given as a live object, which no file can bring back."""
    rollouts: list[str] | None = None
    """The sessions that the store held when the run began. None: the run follows the store, or reads none."""
    method: str | None = None
    step: int = 0
    first_line: int = 0
    """Lines of metrics.jsonl before those of this run: an earlier call of `train` in the same directory."""
    checkpoint: str | None = None
    """Relative to the run directory."""
    algorithm_state: dict[str, Any] = field(default_factory=dict[str, Any])
    source: dict[str, Any] = field(default_factory=dict[str, Any])
    """The position in the data."""
    before: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """The held-out rewards of the starting weights, by mode."""
    validation_losses: dict[str, float] = field(default_factory=dict[str, float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    notes: list[str] = field(default_factory=list[str])
    seconds: float = 0.0
    version: int = VERSION

    def write(self, run_dir: Path) -> None:
        """Replace the position, and then remove the weights that it does not need."""
        write_atomically(run_dir / OFFLINE_FILE, orjson.dumps(self, option=orjson.OPT_INDENT_2))
        current = None if self.checkpoint is None else Path(self.checkpoint).name
        for entry in (run_dir / "checkpoints").glob("step-*"):
            if entry.name != current:
                shutil.rmtree(entry)
        if self.validation_losses:
            best = min(self.validation_losses, key=lambda step: (self.validation_losses[step], int(step)))
            forget_all_but(run_dir / BEST / f"step-{int(best):06d}")


def read_position(run_dir: Path) -> OfflinePosition:
    """Raises ResumeError where it cannot be read."""
    path = run_dir / OFFLINE_FILE
    try:
        found = OfflinePosition(**orjson.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ResumeError(f"{path} cannot be read: {error}; start a new run") from error
    if found.version != VERSION:
        raise ResumeError(f"{run_dir} was written by another version (position {found.version}); use that version")
    return found


def learned_by(run_dir: Path) -> str | None:
    """The verb of the command line that continues a run. None: there is no run on recorded data, or it has no verb."""
    if not (run_dir / OFFLINE_FILE).exists():
        return None
    name = read_position(run_dir).algorithm
    return next((made.name for made in (DPO, SFTAlgorithm) if reference_to(made) == name), None)


# -- what a run is made of --------------------------------------------------------------------------------------------


def store_file(store: LightningStore | None) -> str | None:
    """The file of an embedded store."""
    path = getattr(store, "path", None)
    return str(path.resolve()) if isinstance(path, Path) else None


def described(algorithm: Algorithm[Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The settings of an algorithm, what it learns from as far as a file can hold it, and what no file can."""
    config = getattr(algorithm, "config", None)
    settings = config.model_dump(mode="json") if isinstance(config, SFTConfig | DPOConfig) else {}
    sources: dict[str, Any] = {}
    objects: list[str] = []
    for name in SOURCES:
        given = getattr(algorithm, name, None)
        if isinstance(given, str | Path):
            sources[name] = str(Path(given).resolve()) if Path(given).exists() else str(given)
        elif isinstance(given, TrajectoryQuery):
            kept = {key: getattr(given, key) for key in TrajectoryQuery.__slots__ if key != "store"}
            sources[name] = {**kept, "reward_weights": dict(given.reward_weights) if given.reward_weights else None}
        elif given is not None and given != ():
            objects.append(name)
    output = getattr(algorithm, "output", None)
    return settings, sources | ({"output": str(Path(output).resolve())} if output is not None else {}), objects


def restored_algorithm(
    given: Algorithm[Any] | None, position: OfflinePosition, config: TrainConfig, store: LightningStore, run_dir: Path
) -> Algorithm[Any]:
    """The algorithm of a resumed run. Raises ResumeError where it has to be given again, or is another one."""
    way_out = f"give it again: Trainer.resume({str(run_dir)!r}, algorithm=...)"
    if given is not None:
        if class_name(given) != position.algorithm:
            raise ResumeError(f"{run_dir} is trained by {position.algorithm}, not by {class_name(given)}; {way_out}")
        return given
    if lost := [name for name in position.objects if name in (*SOURCES, "algorithm")]:
        raise ResumeError(f"{run_dir} was started with {', '.join(lost)} given as objects in memory; {way_out}")
    if position.algorithm == reference_to(DPO):
        return DPO(settings_from(DPOConfig, position.settings), data=position.sources.get("data"))
    if position.algorithm == reference_to(SFTAlgorithm):
        sources = {name: _source(each, store) for name, each in position.sources.items()}
        return SFTAlgorithm(config=settings_from(SFTConfig, position.settings), **sources)
    made = _from_settings(config, position)
    if class_name(made) != position.algorithm:
        raise ResumeError(
            f"{run_dir} is trained by {position.algorithm}, which its settings do not bring back; {way_out}"
        )
    return made


def _from_settings(config: TrainConfig, position: OfflinePosition) -> Algorithm[Any]:
    """In config.toml every setting is set: those that nobody gave or has changed are left out again."""
    settings = config.algorithm
    if not isinstance(settings, LightningRLConfig):
        return make_algorithm(settings)
    known, default = type(settings).model_fields, LightningRLConfig()
    given = {name: getattr(settings, name) for name in known if name != "type"}
    return LightningRL(
        **{key: each for key, each in given.items() if key in position.given or each != getattr(default, key)}
    )


def _source(recorded: Any, store: LightningStore) -> Any:
    if not isinstance(recorded, Mapping):
        return recorded
    fields: dict[str, Any] = {**recorded}
    if fields.get("pass_rate") is not None:
        fields["pass_rate"] = tuple(fields["pass_rate"])
    return TrajectoryQuery(store, **fields)
