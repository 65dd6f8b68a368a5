"""Supervised learning: the policy imitates conversations, or the trajectories it is given.

    L = - sum_t  w_t  log p(token_t)         over the tokens an assistant wrote, its end-of-turn token included

with equal w_t that sum to 1 over a batch. All other tokens (system, user and tool turns, and the template's own) are
read and not trained on. The conversations of a batch become one token tree: a system prompt they share is stored once,
and computed once where that is faster.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict, Field

from agentlightning.algorithms._conversations import load_conversations, to_trajectories
from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.training import Collected, Training
from agentlightning.assemble import token_tree
from agentlightning.errors import ConfigError
from agentlightning.policy.base import Policy
from agentlightning.policy.losses import Loss, LossSetting, NLLLoss
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.policy.requirements import require_training
from agentlightning.trajectory import TrainingSample, Trajectory
from agentlightning.util.event_loop import run_sync
from agentlightning.util.settings import SettingsSignature, settings_from

if TYPE_CHECKING:
    from agentlightning.policy.local import LocalPolicy

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called after each step with its number, from 1, and its metrics."""


class SFTConfig(BaseModel):
    """The settings of supervised learning.

    >>> agl.SFTConfig(epochs=2).shuffle
    True
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    steps: int | None = Field(default=None, ge=1)
    """Updates; the data starts again when all of it was used. None: `epochs` times through the data."""
    epochs: int = Field(default=1, ge=1)
    """Passes through the data, where `steps` is not given."""
    batch_size: int = Field(default=16, ge=1)
    """Conversations in each update."""
    shuffle: bool = True
    """A new order in each epoch; False keeps the order of the dataset."""
    seed: int = 0
    """The seed of the shuffling."""
    token_budget: int = Field(default=8192, ge=1)
    """Tokens of one forward pass, padding included."""
    loss: Loss = Field(default_factory=NLLLoss)
    """The token-level loss."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """How weights are updated, where `model` is a path; a policy brings its own. `total_steps` is filled in."""


class SFTSettings(TypedDict, total=False):
    """The fields of `SFTConfig` as arguments, for editors and type checkers; a section may be a table."""

    steps: int | None
    epochs: int
    batch_size: int
    shuffle: bool
    seed: int
    token_budget: int
    loss: LossSetting
    optimizer: OptimizerConfig | Mapping[str, Any]


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


class SFTAlgorithm(Algorithm[SFTConfig]):
    """Supervised learning of `model` on `dataset`: by itself (`train`), or as the algorithm of a `Trainer`, which
    measures an agent before and after, validates and keeps checkpoints.

    model: a policy, or a directory or hub name that transformers loads; None: the trainer's.
    dataset: a list, or the path of a JSONL, JSON or Parquet file, of conversations: `{"messages": [...]}` with
        `tools` where tools are used, messages in the OpenAI format; or a plain list of messages. Trajectories (of
        successful rollouts, for example) may be among them: their sampled tokens are imitated.
    output: a directory to write the trained model to. A model given as a path needs one, except in a trainer.
    on_step: called after each step.
    settings: those of `SFTConfig`, over those of `config` where both are given.

    Raises ConfigError for settings that cannot work and DatasetError for a conversation that cannot be trained on.

        >>> conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        >>> agl.SFTAlgorithm("path/to/model", [conversation], steps=2, output="trained").total_steps
        2
    """

    name = "sft"
    objective = "supervised"

    __signature__ = SettingsSignature(SFTConfig)

    def __init__(
        self,
        model: str | Path | Policy | None = None,
        dataset: str | Path | Sequence[Any] = (),
        *,
        output: str | Path | None = None,
        on_step: OnStep | None = None,
        config: SFTConfig | None = None,
        **settings: Unpack[SFTSettings],
    ) -> None:
        if model is not None and not isinstance(model, str | Path) and not hasattr(model, "chat"):
            raise ConfigError(
                f"model is a {type(model).__name__} object; give a directory (save_pretrained writes one), or a policy"
            )
        self.config = settings_from(SFTConfig, settings, base=config, source="from the arguments of SFTAlgorithm")
        self.dataset = dataset
        self.output = Path(output) if output is not None else None
        self.on_step = on_step
        self._model = model

    @property
    def model(self) -> str | Path | Policy | None:
        return self._model

    @property
    def total_steps(self) -> int:
        per_epoch = -(-len(self._records) // self.config.batch_size)
        return self.config.steps or self.config.epochs * per_epoch

    @cached_property
    def _records(self) -> Sequence[Any]:
        return load_conversations(self.dataset)

    def train(self) -> SFTResult:
        """`run`, for callers without an event loop."""
        return run_sync(self.run())

    async def run(self, training: Training | None = None) -> SFTResult:
        """Do all steps, or within a trainer those that are left; write the model if an `output` was given."""
        model = self.model
        await asyncio.to_thread(lambda: self._records)
        if training is not None:
            return await self._learn(_TrainingLoop(training))
        if model is None:
            raise ConfigError("no model: give model=DIRECTORY and output=DIRECTORY, or give the algorithm to a Trainer")
        if not isinstance(model, str | Path):
            return await self._learn(_PolicyLoop(model))
        if self.output is None:
            raise ConfigError(f"model={str(model)!r} is trained in a copy; give output=DIRECTORY to write it to")
        policy = await asyncio.to_thread(self._open, str(model), self.total_steps)
        try:
            return await self._learn(_PolicyLoop(policy))
        finally:
            await policy.close()

    async def _learn(self, learner: _PolicyLoop | _TrainingLoop) -> SFTResult:
        steps = self.total_steps
        examples = await asyncio.to_thread(to_trajectories, self._records, learner.chat, learner.context_length)
        losses: list[float] = []
        tokens = 0
        for step, batch in enumerate(batches(len(examples), steps, self.config), 1):
            if step <= learner.first_step:
                continue
            sample = to_sample([examples[index] for index in batch])
            metrics = await learner.update(sample, loss=self.config.loss, token_budget=self.config.token_budget)
            losses.append(metrics["loss"])
            tokens += int(sum(map(len, sample.weights)))
            if self.on_step is not None:
                self.on_step(step, metrics)
        if self.output is not None:
            await learner.save(self.output)
        return SFTResult(steps, len(examples), tokens, tuple(losses), self.output)

    def _open(self, path: str, steps: int) -> LocalPolicy:
        require_training()
        from agentlightning.policy.local import LocalPolicy
        from agentlightning.policy.local_config import LocalPolicyConfig

        optimizer = OptimizerConfig.model_validate(self.config.optimizer.model_dump() | {"total_steps": steps})
        config = LocalPolicyConfig(model=path, seed=self.config.seed, optimizer=optimizer, objective="supervised")
        return LocalPolicy.open(config)


class _PolicyLoop:
    """Updates a policy outside a trainer."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.chat, self.context_length, self.first_step = policy.chat, policy.context_length, 0

    async def update(self, sample: TrainingSample, **options: Any) -> Mapping[str, float]:
        return await self.policy.train([sample], **options)

    async def save(self, directory: Path) -> None:
        await self.policy.save(directory)


class _TrainingLoop:
    """Updates the policy of a trainer's run, one step for each batch."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.chat, self.context_length, self.first_step = training.chat, training.context_length, training.step

    async def update(self, sample: TrainingSample, **options: Any) -> Mapping[str, float]:
        metrics = await self.training.update([sample], **options)
        await self.training.finish_step(Collected(()), metrics)
        return metrics

    async def save(self, directory: Path) -> None:
        await self.training.save(directory)


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
    return TrainingSample(tree, weights=[(share,) * len(node.token_ids) for node in tree.nodes])
