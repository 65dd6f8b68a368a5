"""Supervised learning: the policy imitates conversations, or the trajectories it is given.

    L = - sum_t  w_t  log p(token_t)         over the tokens an assistant wrote, its end-of-turn token included

with equal w_t that sum to 1 over a batch. All other tokens (system, user and tool turns, and the template's own) are
read and not trained on. The conversations of a batch become one token tree: a system prompt they share is stored once,
and computed once where that is faster: rows are packed to `token_budget` tokens.

With validation conversations, the loss on them is measured as training goes on, and the model is the one of the step
at which it was lowest.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import FiniteFloat
from pydantic_core import to_jsonable_python

from agentlightning.algorithms.base import (
    Algorithm,
    AlgorithmConfig,
    RolloutsAlgorithm,
    RolloutsConfig,
    learner_of,
    reward_metrics,
)
from agentlightning.algorithms.recorded.sessions import Demonstrations, Tokenizer, load_demonstrations, to_examples
from agentlightning.algorithms.training import Collected, Training
from agentlightning.assemble import token_tree
from agentlightning.credit import of_target
from agentlightning.errors import ConfigError
from agentlightning.policy.base import Metrics, Policy, UpdateOptions
from agentlightning.policy.config import Lora, OptimizerConfig
from agentlightning.policy.losses import Loss, NLLLoss
from agentlightning.policy.open import check_trainable, require_training
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.trajectory import TrainingSample, Trajectory
from agentlightning.util.event_loop import run_sync
from agentlightning.util.settings import AtLeastOne, ShareBelowOne

OnStep = Callable[[int, Metrics], None]
"""Called after each step with its number, from 1, and its metrics."""


class SFTConfig(AlgorithmConfig):
    """The settings of supervised learning.

    >>> agl.config.SFTConfig(epochs=2).shuffle
    True
    """

    type: str = "sft"
    """Which algorithm this is."""
    dataset: str | None = None
    """Conversations: a JSONL, JSON, CSV or Parquet file. None: the successful sessions of the store that a run learns
    from."""
    validation: str | None = None
    """Conversations to measure the loss on, likewise."""
    output: str | None = None
    """A directory that the trained model is also written to."""
    steps: AtLeastOne | None = None
    """Updates; the data starts again when all of it was used. None: `epochs` times through the data."""
    epochs: AtLeastOne = 1
    """Passes through the data, where `steps` is not given."""
    batch_size: AtLeastOne = 16
    """Conversations in each update."""
    shuffle: bool = True
    """A new order in each epoch; False keeps the order of the dataset."""
    seed: int = 0
    """The seed of the shuffling."""
    token_budget: AtLeastOne = 8192
    """Tokens of one forward pass, padding included."""
    loss: Loss = NLLLoss()
    """The token-level loss."""
    target_agent: str | None = None
    """Only answers of agents whose whole name matches this regular expression are learned; a message has its agent in
    `name`. None: all answers."""
    lora: Lora | None = None
    """Train a low-rank adapter of this shape (a table with `r` ...); in a run, `policy.lora`. None: all weights."""
    validation_share: ShareBelowOne = 0.0
    """The share of the conversations that is held back to measure the loss on."""
    validate_every: AtLeastOne = 20
    """Steps between measurements of that loss; it is also measured before the first step and after the last one."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights are updated, where `model` is a path; a policy brings its own. `total_steps` is filled in."""


@dataclass(frozen=True, slots=True)
class SFTResult:
    """What supervised learning did."""

    steps: int
    """Steps of the whole run."""
    conversations: int
    """Conversations in the dataset."""
    tokens: int
    """Tokens trained on, repetitions included."""
    losses: tuple[float, ...]
    """The loss of each step of this call."""
    checkpoint: Path | None
    """The directory the model was written to, if an `output` was given."""
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Conversations and rollouts that were not learned from, by reason."""
    validation_losses: Mapping[int, float] = field(default_factory=dict[int, float])
    """By step, the mean loss of a token of the validation conversations; 0 is before the first step."""
    best_step: int | None = None
    """The step whose weights the model has, where there are validation conversations; else it is the last one."""
    notes: Mapping[str, int] = field(default_factory=dict[str, int])
    """What the chat template could not write as the conversations have it, and what was done, with the number of
    answers: end_of_turn_added, thoughts_added, thoughts_left_out, empty_thoughts, tools_in_messages, drift."""

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values, as `--json` prints it."""
        record: dict[str, Any] = to_jsonable_python(self)
        losses = record.pop("losses")
        return {**record, "loss": losses[-1] if losses else None}


class SFTAlgorithm(Algorithm[SFTConfig]):
    """Supervised learning of `model` on `dataset`: by itself (`train`), or as the algorithm of a `Trainer`, which
    measures an agent before and after, validates and keeps checkpoints.

    model: a policy; a name as in `PolicyConfig.model`; a transformers model, or `(model, tokenizer)` as
        Unsloth's `FastLanguageModel` returns them, which are trained in place; None: the trainer's.
    dataset: conversations: a list, a Hugging Face dataset, or the path of a JSONL, JSON, CSV or Parquet file, of
        `{"messages": [...]}` with `tools` where tools are used, messages in the OpenAI format; or plain lists of
        messages. Trajectories may be among them: their sampled tokens are imitated. Or
        `store.get_successful_trajectories()`.
    validation: conversations to measure the loss on, in the same forms; None: `validation_share` of the dataset.
    output: a directory to write the trained model to. A model given as a path needs one, except in a trainer.
    on_step: called after each step.
    settings: those of `SFTConfig`, over those of `config` where both are given.

    Raises ConfigError for settings that cannot work and DatasetError for a conversation that cannot be trained on.

        >>> conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        >>> agl.SFTAlgorithm("path/to/model", [conversation], steps=2, output="trained").total_steps
        2
    """

    name = "sft"
    config_class = SFTConfig
    objective = "supervised"
    model: Any = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        model: Any = None,
        dataset: Any = None,
        *,
        validation: Any = None,
        output: str | Path | None = None,
        on_step: OnStep | None = None,
        config: SFTConfig | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, SFTConfig):
            model, config = None, model
        check_trainable(model)
        given = {"dataset": dataset, "validation": validation, "output": output}
        files = {name: str(each) for name, each in given.items() if isinstance(each, str | Path)}
        super().__init__(config, **settings | files)
        self.dataset = self.config.dataset if dataset is None or "dataset" in files else dataset
        self.validation = self.config.validation if validation is None or "validation" in files else validation
        self.output = None if self.config.output is None else Path(self.config.output)
        self.on_step = on_step
        self.model = model
        self._loaded: Demonstrations | None = None

    @property
    def has_dataset(self) -> bool:
        """Whether it was given anything to learn from."""
        return self.dataset is not None and not (isinstance(self.dataset, list | tuple) and not self.dataset)

    @property
    def reads_sessions(self) -> bool:
        return isinstance(self.dataset, TrajectoryQuery) or not self.has_dataset

    @property
    def restorable(self) -> bool:
        own = (self.dataset, self.validation) == (self.config.dataset, self.config.validation)
        return own and super().restorable

    def on(self, dataset: Any) -> SFTAlgorithm:
        """The same learning on another dataset."""
        found = copy.copy(self)
        found.dataset, found._loaded = dataset, None
        return found

    @property
    def total_steps(self) -> int:
        config = self.config
        return config.steps or config.epochs * -(-len(self._demonstrations.training) // config.batch_size)

    @property
    def _demonstrations(self) -> Demonstrations:
        if self._loaded is None:
            run_sync(self._load())
        assert self._loaded is not None
        return self._loaded

    async def _load(self) -> None:
        if self._loaded is None:
            dataset, share = self.dataset if self.has_dataset else (), self.config.validation_share
            self._loaded = await load_demonstrations(dataset, self.validation, share=share, seed=self.config.seed)

    def train(self) -> SFTResult:
        """`run`, for callers without an event loop."""
        return run_sync(self.run())

    async def run(self, training: Training | None = None) -> SFTResult:
        """Do all steps, or within a trainer those that are left; write the model if an `output` was given."""
        model = self.model
        await self._load()
        if training is not None:
            return await self._learn(training)
        if model is None:
            raise ConfigError("no model: give model=DIRECTORY and output=DIRECTORY, or give the algorithm to a Trainer")
        if isinstance(model, str | Path) and self.output is None:
            raise ConfigError(f"model={str(model)!r} is trained in a copy; give output=DIRECTORY to write it to")
        async with AsyncExitStack() as stack:
            policy: Any = model
            if not hasattr(model, "chat"):
                policy = await asyncio.to_thread(self._open, model, self.total_steps)
                stack.push_async_callback(policy.close)
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="agl-best-")))
            return await self._learn(_PolicyTraining(policy, folder))

    async def _learn(self, training: Any) -> SFTResult:
        """Do the steps after `training.step`."""
        first, steps, found = training.step, self.total_steps, self._demonstrations
        learner = learner_of(training)
        tokenizer = Tokenizer(learner.chat, learner.context_length, target=self.config.target_agent)
        examples, left_out = await asyncio.to_thread(to_examples, found.training, tokenizer)
        held_back: list[Trajectory] = []
        if found.validation:
            held_back, unmeasured = await asyncio.to_thread(to_examples, found.validation, tokenizer)
            left_out |= {f"validation_{reason}": count for reason, count in unmeasured.items()}
        trees = [tree for each in held_back if (tree := token_tree([each])).num_sampled]
        losses, validation_losses, tokens = list[float](), dict[int, float](), 0

        async def validate(step: int) -> Metrics:
            if not trees or not (step % self.config.validate_every == 0 or step == steps):
                return {}
            scores = (await learner.score(trees, {"logprobs"}))["logprobs"]
            total = sum(float(each.sum()) for tree in scores for each in tree)
            validation_losses[step] = -total / sum(tree.num_sampled for tree in trees)
            return {"validation_loss": validation_losses[step]}

        async def keep(step: int) -> None:
            if step in validation_losses:
                await training.keep_best(-validation_losses[step])

        await validate(first)
        await keep(first)
        options = UpdateOptions(loss=self.config.loss, token_budget=self.config.token_budget)
        for step, batch in islice(enumerate(batches(len(examples), steps, self.config), 1), first, None):
            sample = to_sample([examples[index] for index in batch])
            metrics = await training.update([sample], options)
            losses.append(metrics["loss"])
            tokens += int(sum(map(len, sample.weights)))
            metrics = {**metrics, **await validate(step)}
            await training.finish_step(Collected(()), metrics)
            await keep(step)
            if self.on_step is not None:
                self.on_step(step, metrics)
        best = await training.restore_best() if isinstance(training, _PolicyTraining) else None
        if self.output is not None:
            await learner.save(self.output)
        return SFTResult(
            steps,
            len(examples),
            tokens,
            tuple(losses),
            self.output,
            {**found.left_out, **left_out},
            validation_losses,
            best,
            dict(tokenizer.counts),
        )

    def _open(self, model: Any, steps: int) -> Policy:
        require_training()
        from agentlightning.policy.config import LocalPolicyConfig
        from agentlightning.policy.local import open_trainable

        optimizer = OptimizerConfig.model_validate(self.config.optimizer.model_dump() | {"total_steps": steps})
        path = str(model) if isinstance(model, str | Path) else ""
        config = LocalPolicyConfig(
            model=path, seed=self.config.seed, optimizer=optimizer, objective="supervised", lora=self.config.lora
        )
        return open_trainable(config, model)


class _PolicyTraining:
    """What supervised learning needs of a `Training`, for a policy outside a trainer."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        self.learner = policy
        self.step = 0
        self._best: tuple[float, int] | None = None
        """The highest score, and its step; the weights are in `_folder`."""
        self._folder = folder

    async def update(self, samples: Sequence[TrainingSample], options: UpdateOptions) -> Metrics:
        return await self.learner.train(samples, options)

    async def finish_step(self, collected: Collected, metrics: Metrics) -> None:
        self.step += 1

    async def keep_best(self, score: float) -> None:
        if self._best is None or score > self._best[0]:
            self._best = score, self.step
            await self.learner.save(self._folder, training_state=True)

    async def restore_best(self) -> int | None:
        """Return to the weights that were kept; returns their step."""
        if self._best is None:
            return None
        if self._best[1] != self.step:
            await self.learner.load(self._folder)
        return self._best[1]


def batches(count: int, steps: int, config: SFTConfig) -> Iterator[list[int]]:
    """The indices of the examples of each update, out of `count`. Each epoch has every example once."""
    rng = random.Random(config.seed)
    waiting: list[int] = []
    for _ in range(steps):
        if not waiting:
            waiting = list(range(count))
            if config.shuffle:
                rng.shuffle(waiting)
        yield waiting[: config.batch_size]
        del waiting[: config.batch_size]


def to_sample(trajectories: Sequence[Trajectory]) -> TrainingSample:
    """A batch as one tree, in which all tokens to imitate have the same weight. The weights sum to 1."""
    tree = token_tree(trajectories)
    share = 1.0 / max(1, tree.num_sampled)
    return TrainingSample(tree, weights=[share] * len(tree.nodes))


# -- rejection sampling ----------------------------------------------------------------------------------------------


class RejectionSamplingConfig(RolloutsConfig):
    """The settings of rejection sampling fine-tuning.

    >>> agl.config.RejectionSamplingConfig(success_threshold=0.9).tasks_per_step
    16
    """

    type: str = "rejection"
    """Which algorithm this is."""
    success_threshold: FiniteFloat = 0.5
    """The reward from which on a rollout is imitated."""


class RejectionSampling(RolloutsAlgorithm[RejectionSamplingConfig]):
    """Rejection sampling fine-tuning (Yuan et al. 2023, arXiv:2308.01825): imitates the rollouts, new or recorded, that
    earned enough. Of a recorded session with several rewards, it imitates the parts that did.

        >>> agl.RejectionSampling(steps=50, success_threshold=1.0).total_steps
        50
    """

    name = "rejection"
    config_class = RejectionSamplingConfig
    objective = "supervised"

    def is_success(self, trajectory: Trajectory) -> bool:
        """Whether a rollout is imitated."""
        return trajectory.score is not None and trajectory.score >= self.config.success_threshold

    async def _step(self, training: Training) -> None:
        collected, target = await self._rollouts(training), self._target(training)
        chosen = [of_target(each, target) for each in collected.trajectories if self.is_success(each)]
        metrics = {**reward_metrics(collected), "imitated": float(len(chosen))}
        if chosen:
            metrics |= await training.update([to_sample(chosen)], UpdateOptions(loss=NLLLoss()))
        await training.finish_step(collected, metrics)
