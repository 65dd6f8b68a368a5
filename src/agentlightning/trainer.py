"""The trainer: turns its arguments into settings, and has a run carry them out. The only synchronous entry point.

    prepare     tasks, starting policy (warm start included)
    before      held-out reward of the starting policy
    train       the algorithm's steps, validated and checkpointed
    after       held-out reward of the best checkpoint, paired with the first

Every phase reads from the run directory what is done already, so that resuming is the same code as starting. An
algorithm that learns no weights is run without a policy, and without torch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.algorithms.base import ALGORITHMS, Algorithm, make_algorithm
from agentlightning.compat.algorithm import Baseline, with_adapter
from agentlightning.config import DataConfig, Method, TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.policy.open import check_model
from agentlightning.resources import NamedResources, Resource, as_resources, prompts_in
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import load_dataset
from agentlightning.training.callbacks import Callback
from agentlightning.training.persistence.run_dir import (
    changed_settings,
    check_changes,
    overrides,
    read_state,
    settings_of_run,
)
from agentlightning.util.event_loop import run_sync
from agentlightning.util.progress import Progress
from agentlightning.util.settings import chosen, settings_from

if TYPE_CHECKING:
    from agentlightning.compat.runner import Hook
    from agentlightning.run import Run
    from agentlightning.training.dry_run import DryRun
    from agentlightning.training.report.result import TrainingResult


class Trainer:
    """Trains an agent.

    Settings come from `config`; the keyword arguments are shortcuts for its most used fields. `algorithm` is run as it
    is, whatever its class; without one, it is made from the settings. `run_dir` is the directory of the run (default:
    `runs/<time>` below the current directory). `store` replaces the run's own store.

        >>> agl.Trainer(algorithm=agl.LightningRL(steps=50), model="path/to/model", run_dir="runs/first")
        Trainer(algorithm='lightning_rl', model='path/to/model', run_dir='runs/first')
    """

    def __init__(
        self,
        config: TrainConfig | None = None,
        *,
        algorithm: Algorithm[Any] | type[Algorithm[Any]] | str | None = None,
        model: str | Path | None = None,
        reward: Any | None = None,
        store: LightningStoreBase | None = None,
        run_dir: str | Path | None = None,
        n_runners: int | None = None,
        n_workers: int | None = None,
        seed: int | None = None,
        initial_resources: Mapping[str, Resource | str] | None = None,
        progress: Progress | None = None,
        hooks: Hook | Sequence[Hook] | None = None,
        callbacks: Sequence[Callback[Any] | type[Callback[Any]] | str] = (),
        tracer: Any | None = None,
        adapter: Any | None = None,
    ) -> None:
        if tracer is not None:
            from agentlightning.compat.runner import check_tracer

            check_tracer(tracer)
        if isinstance(store, str | Path):  # It may hold a password.
            raise ConfigError(f"store is a {type(store).__name__}, not a store; give store=agl.LightningStore(NAME)")
        self.hooks = hooks
        self.callbacks = [each for each in callbacks if isinstance(each, Callback)]
        """Those that are objects; the settings name the others."""
        if algorithm is not None and not isinstance(algorithm, Algorithm):
            algorithm = make_algorithm(chosen(algorithm, ALGORITHMS))
        self.algorithm = with_adapter(algorithm, adapter)
        runners = n_workers if n_runners is None else n_runners
        named = [each for each in callbacks if not isinstance(each, Callback)]
        self.config = with_arguments(config or TrainConfig(), self.algorithm, model, runners, seed, named)
        resources = as_resources(initial_resources or {})
        prompts = {**self.config.prompts, **prompts_in(resources)}
        self.config = self.config.model_copy(update={"prompts": prompts})
        self.reward = reward if reward is not None else self.config.reward
        self.store = store
        self.run_dir = Path(run_dir) if run_dir is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        self.initial_resources: NamedResources = {**resources, **prompts}
        self.progress = progress or Progress()
        self._trained: Path | None = None
        """What `train` has made of the model."""
        self._resumed_from: TrainConfig | None = None
        """The settings of the run that is resumed, before any change."""
        self._named: list[str] = []
        """The changes."""

    def __repr__(self) -> str:
        algorithm = self.config.algorithm.type if self.algorithm is None else self.algorithm.name
        model = self.config.policy.model
        return f"Trainer(algorithm={algorithm!r}, model={model!r}, run_dir={str(self.run_dir)!r})"

    @classmethod
    def resume(cls, run_dir: str | Path, *, changes: Mapping[str, Any] | Sequence[str] = (), **options: Any) -> Trainer:
        """A trainer that continues the run in `run_dir`; then call `fit`, with the agent where it was a live object, or
        `train` for a run on recorded data.

        `changes` of settings, as `{"algorithm.steps": 200}` or as on the command line, are recorded in the run; a
        finished run continues with more steps. After a change of the agent, the reward or `algorithm.reward_weights`
        the starting policy is measured again, so that both measurements mean the same; an object that replaces an
        object is assumed to be the same one. `options` are those of `Trainer`.

        Raises ResumeError where there is no run, and ConfigError for a change that cannot be made.
        """
        before, named = settings_of_run(Path(run_dir)), overrides(changes)
        trainer = cls(settings_of_run(Path(run_dir), named), run_dir=run_dir, **options)
        trainer._resumed_from, trainer._named = before, named
        check_changes(changed_settings(before, trainer.config))
        return trainer

    def fit(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        held_out_dataset: Sequence[Any] | None = None,
    ) -> TrainingResult:
        """Train `agent` on the tasks of `train_dataset`. Every argument defaults to the one in the configuration.

        `val_dataset` chooses the best checkpoint and `held_out_dataset` measures the gain; without them, shares of the
        training tasks are split off. Ctrl-C ends it with KeyboardInterrupt and leaves the run resumable.
        """
        return run_sync(self.fit_async(agent, train_dataset, val_dataset, held_out_dataset=held_out_dataset))

    def dev(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
    ) -> TrainingResult:
        """Run the agent once on each task, without training, to see that agent, reward and hooks work. The algorithm is
        used if it trains no model. The tasks of `val_dataset` (default: the same) are measured before and after."""
        if self.algorithm is not None and self.algorithm.learns_weights:
            raise ConfigError(
                f"dev() runs the agent without training, and {type(self.algorithm).__name__} trains a model; call"
                " fit(), or make the trainer without an algorithm"
            )
        tasks = load_dataset(train_dataset if train_dataset is not None else self.config.data.train or ())
        trainer, config = copy.copy(self), self.config.with_section("data", validation_share=0.0)
        trainer.config = config.with_section("evaluation", every=0, modes=("greedy",))
        trainer.algorithm = self.algorithm or Baseline(len(tasks))
        return trainer.fit(agent, tasks, held_out_dataset=load_dataset(val_dataset) if val_dataset else tasks)

    def dry_run(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        held_out_dataset: Sequence[Any] | None = None,
    ) -> DryRun:
        """Check everything short of training: imports, tasks, the model, and a few rollouts with their calls, tokens
        and rewards. The arguments are those of `fit`. Leaves nothing behind; raises ConfigError and DatasetError."""
        return run_sync(self._run(agent).dry_run(train_dataset, val_dataset, held_out_dataset))

    async def fit_async(
        self,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        *,
        held_out_dataset: Sequence[Any] | None = None,
    ) -> TrainingResult:
        """`fit`, for callers that have an event loop."""
        return await self._run(agent).fit(train_dataset, val_dataset, held_out_dataset)

    def _run(self, agent: Any) -> Run:
        """A run of the agent, by default that of the settings. An agent or a reward that is given as a name becomes
        one of these."""
        from agentlightning.run import Run  # What runs takes longer to import than all that names it.

        named = {"agent": agent, "reward": self.reward}
        config = self.config.model_copy(update={key: name for key, name in named.items() if isinstance(name, str)})
        return Run(
            config,
            self.algorithm,
            agent if agent is not None else config.agent,
            self.reward,
            self.store,
            self.initial_resources,
            self.callbacks,
            self.hooks,
            self.progress,
            self.run_dir,
            self._resumed_from,
            self._named,
            self._trained,
        )

    def train(
        self,
        num_iterations: int | None = None,
        *,
        target_agent: str | None = None,
        target: str | None = None,
        agent: Any | None = None,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
        held_out_dataset: Any | None = None,
        method: Method | None = None,
        success_threshold: float | None = None,
        follow: bool | None = None,
        follow_timeout: float | None = None,
        eval_agent: Any | None = None,
    ) -> TrainingResult:
        """Learn from the sessions recorded in the store; with an `agent`, from new rollouts, as `fit` does.

        num_iterations: updates (default: the algorithm's steps). target_agent (alias: target): a regular expression for
        the whole name of the agents to train; the calls of others are read and carry no loss. method: how LightningRL
        learns from sessions of another policy, by default as the data allows: "importance" where log-probabilities were
        recorded, else "awr", or "rejection", which imitates sessions with a reward of `success_threshold` or more.
        follow: learn from each session once, as they arrive, until nothing came for `follow_timeout` seconds. None: as
        the settings (`DataConfig`) say. With an `eval_agent`, its reward on the tasks of `held_out_dataset` is measured
        before and after.

        A second call goes on with the weights of the first, `Trainer.resume(run_dir).train()` with a run that was
        killed. Raises DatasetError where the store holds nothing that the algorithm can learn from, saying what is
        missing, and ConfigError for arguments that do not go together.
        """
        if target is not None and target_agent not in (None, target):
            raise ConfigError(f"target_agent={target_agent!r} and target={target!r} are two names of one setting")
        learning = given(steps=num_iterations, target_agent=target_agent if target_agent is not None else target)
        waiting = {"follow": follow, "follow_timeout": follow_timeout}
        data = given(method=method, success_threshold=success_threshold, **waiting)
        recorded = self.is_recorded or (self._resumed_from is None and agent is None and self.config.agent is None)
        if recorded and agent is not None:
            raise ConfigError("the run learns from recorded data, without an agent; leave it out, or data.sessions")
        if recorded and (train_dataset is not None or val_dataset is not None):
            raise ConfigError("tasks are for an agent to run: give agent=..., or leave the datasets out")
        if not recorded and (extra := [*data, *([] if eval_agent is None else ["eval_agent"])]):
            raise ConfigError(f"{', '.join(extra)}: for recorded sessions only; leave out the agent, or these")
        trainer = copy.copy(self)
        if learning:
            made = self._chosen.with_settings(learning, "given to train")
            trainer.algorithm = None if self.algorithm is None else made
            trainer.config = with_arguments(trainer.config, made)
        own = settings_from(DataConfig, data, base=trainer.config.data, source="given to train")
        trainer.config = trainer.config.model_copy(update={"data": own})
        if self._resumed_from is not None:
            check_changes(changed_settings(self._resumed_from, trainer.config))
        if not recorded:
            return trainer.fit(agent, train_dataset, val_dataset, held_out_dataset=held_out_dataset)
        result = run_sync(trainer._run(eval_agent).fit(held_out=held_out_dataset, recorded=True))
        self._trained = result.checkpoint
        return result

    @property
    def is_recorded(self) -> bool:
        """Whether the settings, or the run that is resumed, learn from recorded data by `train`."""
        if self._resumed_from is not None:
            return read_state(self.run_dir).recorded is not None
        return self.config.is_recorded

    @property
    def _chosen(self) -> Algorithm[Any]:
        """The algorithm object, else the one that the settings name."""
        return self.algorithm or make_algorithm(self.config.algorithm)


def given(**arguments: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: each for name, each in arguments.items() if each is not None}


def with_arguments(
    config: TrainConfig,
    algorithm: Algorithm[Any] | None,
    model: str | Path | None = None,
    n_runners: int | None = None,
    seed: int | None = None,
    callbacks: Sequence[Any] = (),
) -> TrainConfig:
    """The configuration with the arguments of a trainer in it. Raises ConfigError where they do not go together."""
    changes: dict[str, Any] = {}
    settings = getattr(algorithm, "config", None)
    if algorithm is not None and (algorithm.restorable or getattr(settings, "type", "") in ALGORITHMS):
        changes["algorithm"] = settings
    models = [each for each in (model, algorithm and algorithm.model) if each is not None]
    for each in models:
        check_model(each)
    if len({*map(str, models)}) > 1:
        raise ConfigError(
            f"model={str(model)!r} was given to the trainer and {str(models[1])!r} to the algorithm; give one"
        )
    named = str(models[0]) if models and isinstance(models[0], str | Path) else None
    others = (*config.run.callbacks, *callbacks) if callbacks else None
    parts = {
        "policy": (given(model=named), "given to Trainer"),
        "runner": (given(hosts=n_runners), "given as n_runners"),
        "run": (given(seed=seed, callbacks=others), "given to Trainer"),
    }
    for name, (values, source) in parts.items():
        if values:
            section = getattr(config, name)
            changes[name] = settings_from(type(section), values, base=section, source=source)
    found = config.model_copy(update=changes)
    run_by = algorithm or make_algorithm(found.algorithm)
    for stage in getattr(run_by, "stages", (run_by,)):
        found = with_lora(found, getattr(stage, "config", None))
    if run_by.selects_result and not run_by.learns_weights and "modes" not in found.evaluation.model_fields_set:
        # Without a policy there is no temperature to set: both modes would measure the same twice.
        found = found.with_section("evaluation", modes=("sampled",))
    found.check_sections()
    return found


def with_lora(config: TrainConfig, settings: object) -> TrainConfig:
    """The configuration with the adapter that settings of an algorithm ask for."""
    lora = getattr(settings, "lora", None)
    if lora is None:
        return config
    if config.policy.lora not in (None, lora):
        raise ConfigError("lora was given to the algorithm and, another one, as policy.lora; give one of them")
    return config.with_section("policy", lora=lora)
