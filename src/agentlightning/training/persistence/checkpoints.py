"""Checkpoints of a run: the weights and training state of its policy, what its algorithm has learned beside them, and
the resources it published; and the policy that it starts or resumes with."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.sft import SFTAlgorithm, SFTConfig
from agentlightning.config import RunConfig, TrainConfig
from agentlightning.engine.base import AgentEngines, Engine
from agentlightning.errors import ConfigError, PolicyError, ResumeError
from agentlightning.models.resolve import TINY
from agentlightning.policy import open as opening
from agentlightning.policy.base import Metrics, Policy, capabilities_of
from agentlightning.policy.learner import Learner
from agentlightning.resources import LLM, NamedResources, ProxyLLM, named_resources, prompts_in
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import load_dataset
from agentlightning.training.persistence.run_dir import (
    ALGORITHM_FILE,
    KeptCheckpoint,
    RunDir,
    RunState,
    Tasks,
    readable,
    write_atomically,
)
from agentlightning.util.progress import Progress

# -- publisher -------------------------------------------------------------------------------------------------------

# Publishes to the store the resources that rollouts are given: the policy's address, and what an algorithm tunes.


class ResourcePublisher(Struct):
    """Publishes the present weights and resources under a name for each purpose."""

    store: LightningStoreBase
    server_url: str
    policy: Engine | None
    resources: NamedResources
    """What rollouts are given beside the policy."""
    max_calls: int | None = None
    """The answers of the policy that a rollout is given at most. None: any number."""
    published: bool = False
    """Whether an algorithm has replaced a resource."""

    def publish(self, resources: NamedResources) -> None:
        """Replace resources by name."""
        self.resources = {**self.resources, **resources}
        self.published = self.published or bool(resources)

    async def write(
        self,
        resources_id: str,
        sampling: Mapping[str, float],
        max_calls: int | None = None,
        resources: NamedResources | None = None,
    ) -> str:
        """Write `resources`, by default the present ones, and the policy to the store; again under the same id after a
        crash, at the new address. A rollout is given at most `max_calls` answers of the policy."""
        engines: dict[str, Engine] = {} if self.policy is None else {"llm": self.policy}
        if isinstance(self.policy, AgentEngines):  # Each of its adapters.
            start = f"{self.policy.model}:"
            engines |= {f"llm:{model.removeprefix(start)}": view for model, view in self.policy.views.items()}
        max_calls = min((limit for limit in (max_calls, self.max_calls) if limit is not None), default=None)
        given = dict(resources or self.resources)
        for name, engine in engines.items():
            given[name] = ProxyLLM(
                endpoint=self.server_url,
                model=engine.model,
                sampling_parameters=dict(sampling),
                policy_version=engine.policy_version,
                max_calls=max_calls,
            )
        await self.store.update_resources(resources_id, given)
        return resources_id


RESOURCES_FILE = "resources.json"
"""In a checkpoint: the resources that the algorithm has published, if any, and the run's prompts."""


SLOW_CHECKPOINT = 1.0
"""Seconds. One that takes less is written after each step ..."""
CHECKPOINT_SHARE = 9
"""... and of others so few that training takes nine times as long."""


class Checkpoints(Struct):
    """Writes and restores what the run has learned."""

    run_dir: RunDir
    state: RunState
    config: RunConfig
    learner: Learner | None
    publisher: ResourcePublisher
    algorithm: Algorithm[Any]
    note: Callable[[str], None] = lambda text: None
    """Shows a message to the user."""
    _saved: int | None = None
    """The version of the weights that were saved last ..."""
    _places: set[Path] = set()
    """... and the directories that hold them."""
    _slowest: float = 0.0
    """The most seconds that one took."""
    _finished: float = 0.0
    """When the last one was."""

    @property
    def version(self) -> int | None:
        """That of the present weights."""
        return self.learner and self.learner.policy_version

    @property
    def written(self) -> KeptCheckpoint | None:
        """The last one that was saved; None before the first."""
        if self.state.checkpoint is None:
            return None
        return {"directory": self.state.checkpoint, "step": self.state.step, "version": self.version}

    async def write(self, step: int) -> str:
        """A checkpoint of the present weights and resources. Returns its directory, relative to the run's."""
        directory = self.run_dir.checkpoint(step)
        if self.learner is not None:
            version = self.learner.policy_version
            known = {each for each in self._places if version == self._saved and each.exists()}
            if not await asyncio.to_thread(_link, known, directory):
                await self.learner.policy.save(directory, training_state=True)
                known = set()
            self._saved, self._places = version, {*known, directory}
        await self._write_resources(directory)
        if learned := self.algorithm.state_dict():
            content = orjson.dumps({"revision": self.state.revision, "state": learned})
            await asyncio.to_thread(_write, directory / ALGORITHM_FILE, content)
        else:
            (directory / ALGORITHM_FILE).unlink(missing_ok=True)
        return str(directory.relative_to(self.run_dir.path))

    async def keep(self) -> KeptCheckpoint:
        """Write one to return to."""
        step = self.state.step
        return {"directory": await self.write(step), "step": step, "version": self.version}

    async def save(self) -> None:
        """Write one, and name it in the state."""
        started = time.monotonic()
        self.state.checkpoint = await self.write(self.state.step)
        self._finished = time.monotonic()
        took = self._finished - started
        if self._slowest < SLOW_CHECKPOINT <= took and self.config.checkpoint_every is None:
            self.note(
                f"a checkpoint takes {took:.1f} s to write, so that one is written about every"
                f" {CHECKPOINT_SHARE * took:.0f} s (run.checkpoint_every)"
            )
        self._slowest = max(self._slowest, took)
        self.state.checkpoint_version = self.version

    def is_due(self, *, is_last: bool) -> bool:
        """Whether the step, perhaps the last one, is one to save."""
        every = self.config.checkpoint_every
        if is_last or every is not None:
            return is_last or self.state.step % (every or 1) == 0
        return self._slowest < SLOW_CHECKPOINT or time.monotonic() - self._finished >= CHECKPOINT_SHARE * self._slowest

    async def export(self, directory: Path) -> None:
        """The present weights as transformers loads them, and the resources."""
        if self.learner is not None:
            await self.learner.save(directory)
        await self._write_resources(directory)

    async def rollback(self, checkpoint: str, version: int | None = None) -> None:
        """Return to the weights and resources of a checkpoint. `version`: that of its weights, to count updates from;
        they have a new one from now on."""
        if self.learner is not None:
            await self.learner.rollback(self.run_dir.path / checkpoint)
            if version is not None:
                self.state.resumes.append([version, self.learner.policy_version])
        self.publisher.publish(read_resources(self.run_dir.path, checkpoint))
        self.restore_algorithm(checkpoint)

    def restore_algorithm(self, checkpoint: str | None) -> None:
        """Give the algorithm what it had learned at a checkpoint. Not if rewards have changed their meaning since.
        Raises ResumeError where it cannot be read."""
        if checkpoint is None:
            return
        path = self.run_dir.path / checkpoint / ALGORITHM_FILE
        if not path.exists():
            return
        with readable(path):
            record = orjson.loads(path.read_bytes())
            revision, learned = record["revision"], record["state"]
        if revision == self.state.revision:
            self.algorithm.load_state_dict(learned)

    async def _write_resources(self, directory: Path) -> None:
        if self.publisher.published or self.learner is None or prompts_in(self.publisher.resources):
            content = named_resources.dump_json(self.publisher.resources, indent=2)
            await asyncio.to_thread(_write, directory / RESOURCES_FILE, content)


def _link(known: Set[Path], directory: Path) -> bool:
    """Make `directory` a checkpoint of the same weights as those known by hard links, which take no space. False where
    it has to be saved: no older checkpoint, another one in its place, or a file system without links."""
    if directory in known:
        return True
    if not known or directory.exists():
        return False
    without = shutil.ignore_patterns(RESOURCES_FILE, ALGORITHM_FILE)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as beside:
        try:
            shutil.copytree(min(known), Path(beside) / "new", copy_function=os.link, ignore=without)
        except (OSError, shutil.Error):
            return False
        (Path(beside) / "new").rename(directory)
    return True


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def read_resources(run_dir: Path, checkpoint: str | None) -> NamedResources:
    """The resources in a checkpoint; empty where it has none. Raises ResumeError where they cannot be read."""
    if checkpoint is None:
        return {}
    path = run_dir / checkpoint / RESOURCES_FILE
    if not path.exists():
        return {}
    with readable(path):
        return named_resources.validate_json(path.read_bytes())


async def load_weights(policy: Policy, run_dir: RunDir, state: RunState, store: LightningStoreBase) -> None:
    """Load the run's last checkpoint, if it has one, under a version that no agent was given."""
    if state.checkpoint is None:
        return
    directory = run_dir.path / state.checkpoint
    try:
        await policy.load(directory, above=await newest_version(store, state))
    except PolicyError as error:
        raise ResumeError(f"{run_dir.path} cannot continue from {directory}: {error}") from error
    if state.checkpoint_version is not None:
        state.resumes.append([state.checkpoint_version, policy.policy_version])
        run_dir.write_state(state)


async def newest_version(store: LightningStoreBase, state: RunState) -> int:
    """The newest policy_version that agents can have met after the checkpoint, in steps whose results a crash lost. At
    each of these steps rollouts of at least one turn were given resources, and the version grew by one."""
    step, newest = state.step, 0
    while (published := await store.get_resources_by_id(state.step_name(step))) is not None:
        llm = published.resources.get("llm")
        if isinstance(llm, LLM):
            newest = max(newest, llm.policy_version or 0)
        step += 1
    return newest if state.checkpoint_version is None else max(newest, state.checkpoint_version + step - state.step)


# -- starting policy -------------------------------------------------------------------------------------------------

# The policy that a run starts or resumes with: the configured model, a tiny one, or one after its warm start.


def has_random_weights(config: TrainConfig) -> bool:
    """Whether the run starts from random weights."""
    return config.policy.model == TINY and config.warm_start.dataset is None


async def make_starting_policy(config: TrainConfig, run_dir: RunDir, tasks: Tasks, progress: Progress) -> None:
    """Write the starting policy to the run directory, unless it is there or the configured model is used as it is."""
    warm_start, model = config.warm_start, config.policy.model
    if run_dir.start.exists() or (model != TINY and warm_start.dataset is None):
        return
    conversations = load_dataset(warm_start.dataset) if warm_start.dataset else []
    if model == TINY:
        from agentlightning.models.tiny import make_tiny

        progress.phase("making a tiny policy", 1)
        records = [*tasks.train, *conversations]
        model = str(await asyncio.to_thread(make_tiny, run_dir.path / TINY, records, seed=config.run.seed))
    settings: Any = SFTConfig(**dict(warm_start), seed=config.run.seed, token_budget=config.policy.token_budget)
    learning = SFTAlgorithm(None, conversations, config=settings)
    steps = learning.total_steps if conversations else 0
    policy = await opening.open_policy(
        opening.policy_config(
            # A warm start trains all weights; without one they are only written.
            config.policy.model_copy(update={"lora": None} | ({} if conversations else {"kind": "local"})),
            model,
            optimizer=warm_start.optimizer,
            steps=max(1, steps),
            objective=learning.objective,
            seed=config.run.seed,
        )
    )

    def report(step: int, metrics: Metrics) -> None:
        progress.update(step, loss=metrics["loss"])

    try:
        if conversations:
            progress.phase("warm start", steps)
            learning.model, learning.on_step = policy, report
            await learning.run()
        await policy.save(run_dir.start)
    finally:
        await policy.close()


async def open_for_training(
    config: TrainConfig,
    algorithm: Algorithm[Any],
    run_dir: RunDir,
    state: RunState,
    store: LightningStoreBase,
    progress: Progress,
    check: Callable[[Policy], Awaitable[None]] | None,
) -> Policy:
    """The policy of a run and its servers: with the starting weights if these are still to be measured, else with those
    of its last checkpoint. `check` sees the policy before any server gets its weights. Raises ConfigError, PolicyError,
    and ResumeError for a checkpoint that does not fit."""
    settings = opening.policy_config(
        config.policy,
        str(run_dir.start) if run_dir.start.exists() else config.policy.model,
        optimizer=algorithm.optimizer or getattr(config.algorithm, "optimizer", None),
        steps=algorithm.optimizer_steps,
        objective=algorithm.objective,
        seed=config.run.seed,
        agents=algorithm.agents,
    )
    policy = await opening.open_trained(config.policy, settings)
    try:
        if config.policy.in_flight and not capabilities_of(policy).in_flight:
            raise ConfigError(
                "policy.in_flight = true: this policy cannot change its weights while answers are drawn; leave"
                " in_flight false, and they finish first"
            )
        if check is not None:
            await check(policy)
        if not state.measures_start(config.evaluation.modes):
            await load_weights(policy, run_dir, state, store)
    except BaseException:
        await policy.close()
        raise
    if config.policy.engine != "local":
        progress.phase("starting model servers", 1)
    return await opening.with_servers(policy, config.policy, run_dir.path.absolute() / "servers", settings.dtype)
