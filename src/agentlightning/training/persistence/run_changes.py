"""The settings of a run, and their changes when it is resumed.

What a run consists of (its model, its tasks, its seed, how it is measured) is fixed. How its agent is run, how fast it
learns and for how long may change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import orjson
from msgspec import Struct
from pydantic import BaseModel

from agentlightning.algorithms.base import ALGORITHMS
from agentlightning.config import CALLBACKS, HOOKS, TRACKERS, TrainConfig
from agentlightning.credit.base import RULES
from agentlightning.engine.servers.config import ENGINES
from agentlightning.errors import ConfigError, DatasetError, ResumeError
from agentlightning.policy.config import BACKENDS
from agentlightning.policy.losses import LOSSES
from agentlightning.runner.agents.spec import REWARDS
from agentlightning.task import Overlap, load_dataset, overlaps, split, task_key
from agentlightning.training.persistence.run_dir import RunDir, RunState, readable, write_atomically
from agentlightning.util.json_values import dumps, loads
from agentlightning.util.plugins import Registry, file_of
from agentlightning.util.settings import NONE, is_secret, load_settings

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
    config: TrainConfig,
    train: Sequence[Any] | None,
    validation: Sequence[Any] | None,
    held_out: Sequence[Any] | None,
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


def check_disjoint(tasks: Tasks) -> None:
    """Raises DatasetError, which names rows, for a task that is in two splits: a result that was chosen or learned on
    it proves nothing there."""
    if shared := tasks.shared():
        raise DatasetError(
            f"{'; '.join(map(str, shared))}: a result could be chosen on what it is tested with; give each task to one"
            " split"
        )


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


def check_objects(run_dir: Path, state: RunState, **given: object) -> None:
    """Raises ResumeError where a live object of the run was not given again."""
    for name, (what, how) in OBJECTS.items():
        if name in state.objects and not given[name]:
            raise ResumeError(f"{run_dir} {what}: Trainer.resume({str(run_dir)!r}, {name}={how}")
