"""Supervised learning: the policy imitates conversations, or the trajectories it is given.

    L = - sum_t  w_t  log p(token_t)         over the tokens an assistant wrote, its end-of-turn token included

with equal w_t summing to 1 over a batch. Everything else (system, user and tool turns, and what the template writes
around them) is read and not trained on. A conversation is rendered by the model's own chat template, turn by turn,
into the very tokens that the gateway would have built while an agent had it; where a template rewrites earlier turns,
each answer is trained after the prompt it would really follow. The conversations of a batch become one token tree:
a system prompt they share is stored once, and computed once where that pays.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from pydantic import BaseModel, ConfigDict, Field

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.training import Collected, Training
from agentlightning.assemble import token_tree
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.base import Policy
from agentlightning.policy.losses import Loss, LossSetting, NLLLoss
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.policy.requirements import require_training
from agentlightning.task import load_dataset
from agentlightning.trajectory import TrainingSample, Trajectory, Transition
from agentlightning.util.event_loop import run_sync
from agentlightning.util.settings import SettingsSignature, settings_from

if TYPE_CHECKING:
    from agentlightning.policy.local import LocalPolicy

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called after each step with its number, from 1, and its figures."""


class SFTConfig(BaseModel):
    """The settings of supervised learning.

    >>> agl.SFTConfig(epochs=2).shuffle
    True
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    steps: int | None = Field(default=None, ge=1)
    """Updates; the data begins again when it is used up. None: `epochs` times through the data."""
    epochs: int = Field(default=1, ge=1)
    """Times through the data, where `steps` is not given."""
    batch_size: int = Field(default=16, ge=1)
    """Conversations in each update."""
    shuffle: bool = True
    """A new order in each epoch; False keeps the order of the dataset."""
    seed: int = 0
    """Of the shuffling."""
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
    """Of the whole run."""
    conversations: int
    """In the dataset."""
    tokens: int
    """Tokens trained on, repetitions included."""
    losses: tuple[float, ...]
    """One for each step that was done now."""
    checkpoint: Path | None
    """Where the model was written, if an `output` was given."""


class SFTAlgorithm(Algorithm[SFTConfig]):
    """Supervised learning of `model` on `dataset`: by itself (`train`), or as the algorithm of a `Trainer`, which
    measures an agent before and after, validates and keeps checkpoints.

    model: a policy, or a directory or hub name that transformers loads; None: the trainer's.
    dataset: a list, or the path of a JSONL, JSON or Parquet file, of conversations: `{"messages": [...]}` with
        `tools` where tools are used, messages as the OpenAI wire has them; or a plain list of messages. Trajectories
        (of successful rollouts, say) may stand among them: their sampled tokens are what is imitated.
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
        return _records(self.dataset)

    def train(self) -> SFTResult:
        """`run`, for callers without an event loop."""
        return run_sync(self.run())

    async def run(self, training: Training | None = None) -> SFTResult:
        """Do all steps, or within a trainer those that are left; write the model if an `output` was given."""
        model = self.model
        await asyncio.to_thread(lambda: self._records)
        if training is not None:
            return await self._learn(_InTraining(training))
        if model is None:
            raise ConfigError("no model: give model=DIRECTORY and output=DIRECTORY, or give the algorithm to a Trainer")
        if not isinstance(model, str | Path):
            return await self._learn(_Alone(model))
        if self.output is None:
            raise ConfigError(f"model={str(model)!r} is trained in a copy; give output=DIRECTORY to write it to")
        policy = await asyncio.to_thread(self._open, str(model), self.total_steps)
        try:
            return await self._learn(_Alone(policy))
        finally:
            await policy.close()

    async def _learn(self, learner: _Alone | _InTraining) -> SFTResult:
        steps = self.total_steps
        examples = await asyncio.to_thread(to_trajectories, self._records, learner.chat, learner.context_length)
        losses: list[float] = []
        tokens = 0
        for step, batch in enumerate(batches(len(examples), steps, self.config), 1):
            if step <= learner.first_step:
                continue
            sample = to_sample([examples[index] for index in batch])
            figures = await learner.update(sample, loss=self.config.loss, token_budget=self.config.token_budget)
            losses.append(figures["loss"])
            tokens += int(sum(map(len, sample.weights)))
            if self.on_step is not None:
                self.on_step(step, figures)
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


class _Alone:
    """A policy that is trained by itself."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.chat, self.context_length, self.first_step = policy.chat, policy.context_length, 0

    async def update(self, sample: TrainingSample, **options: Any) -> Mapping[str, float]:
        return await self.policy.train([sample], **options)

    async def save(self, directory: Path) -> None:
        await self.policy.save(directory)


class _InTraining:
    """The policy of a trainer's run."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.chat, self.context_length, self.first_step = training.chat, training.context_length, training.step

    async def update(self, sample: TrainingSample, **options: Any) -> Mapping[str, float]:
        figures = await self.training.update([sample], **options)
        await self.training.finish_step(Collected(()), figures)
        return figures

    async def save(self, directory: Path) -> None:
        await self.training.save(directory)


def batches(count: int, steps: int, config: SFTConfig) -> Iterator[list[int]]:
    """Which of `count` examples each of `steps` updates sees. Each epoch sees every example once."""
    rng = random.Random(config.seed)
    waiting: list[int] = []
    for _ in range(steps):
        if not waiting:
            waiting = list(range(count))
            if config.shuffle:
                rng.shuffle(waiting)
        yield waiting[: config.batch_size]
        del waiting[: config.batch_size]


# -- from conversations to tokens ------------------------------------------------------------------------------------


def _records(dataset: str | Path | Sequence[Any]) -> Sequence[Any]:
    if isinstance(dataset, str | Path):
        return load_dataset(dataset)
    if not dataset:
        raise DatasetError("the dataset holds no conversation; give at least one")
    return dataset


def to_trajectories(records: Sequence[Any], chat: ChatFormat, context_length: int) -> list[Trajectory]:
    """Each record as a trajectory whose sampled tokens are the assistant's. A DatasetError names records from 1."""
    return [_trajectory(record, number, chat, context_length) for number, record in enumerate(records, 1)]


def _trajectory(record: Any, number: int, chat: ChatFormat, context_length: int) -> Trajectory:
    name = f"conversation {number}"
    if isinstance(record, Trajectory):
        transitions = record.transitions
    else:
        messages, tools = _conversation(record, name)
        transitions = tuple(_transitions(messages, tools, chat, name))
    longest = max((len(call.prompt_token_ids) + len(call.response_token_ids) for call in transitions), default=0)
    if longest == 0:
        raise DatasetError(f"{name} has no assistant turn to learn from; remove it from the dataset")
    if longest > context_length:
        raise DatasetError(f"{name} has {longest} tokens, the model holds {context_length}; shorten or remove it")
    return Trajectory(rollout_id=name, attempt_id="", transitions=tuple(_owned(call, name) for call in transitions))


def _owned(call: Transition, name: str) -> Transition:
    """The same call under this name: one rollout may stand in a dataset twice, and is then trained twice."""
    return Transition(
        rollout_id=name,
        attempt_id="",
        span_id=f"{name}/{call.sequence_id}",
        sequence_id=call.sequence_id,
        prompt_token_ids=call.prompt_token_ids,
        response_token_ids=call.response_token_ids,
        logprobs=(0.0,) * len(call.response_token_ids),
        agent=call.agent,
    )


def _conversation(record: Any, name: str) -> tuple[list[Message], list[dict[str, Any]] | None]:
    tools: Any = None
    messages: Any = record
    if isinstance(record, Mapping):
        fields = cast("Mapping[str, Any]", record)
        messages, tools = fields.get("messages"), fields.get("tools")
    turns = cast("list[Any]", messages) if isinstance(messages, list) else []
    if not turns or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        shown = repr(record)[:80]
        raise DatasetError(f'{name} is {shown}; give {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    return cast("list[Message]", turns), tools


def _transitions(
    messages: list[Message], tools: list[dict[str, Any]] | None, chat: ChatFormat, name: str
) -> Iterator[Transition]:
    """One transition for each assistant turn: the tokens before it, and its own."""
    ends = [chat.decode([token]) for token in sorted(chat.eos_token_ids)]
    text, ids = "", tuple[int, ...]()
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.render(messages[:position], tools, True)
        through = chat.render(messages[: position + 1], tools, False)
        if not through.startswith(before):
            raise DatasetError(f"{name}: the chat template does not render turn {position + 1} after its own prompt")
        if not before.startswith(text):
            text, ids = "", ()
        ids += tuple(chat.encode(before[len(text) :]))
        text = through[: _end_of_turn(through, len(before), ends)]
        answer = tuple(chat.encode(text[len(before) :]))
        yield Transition(name, "", "", position + 1, ids, answer, ())
        ids += answer


def _end_of_turn(text: str, start: int, ends: Sequence[str]) -> int:
    """Where the answer that begins at `start` is over: behind its last end-of-turn token, or at the end of the text."""
    found = [at + len(end) for end in ends if (at := text.rfind(end, start)) >= 0]
    return max(found, default=len(text))


def to_sample(trajectories: Sequence[Trajectory]) -> TrainingSample:
    """One batch as one tree in which every token to imitate weighs the same. All weights sum to 1."""
    tree = token_tree(trajectories)
    share = 1.0 / max(1, tree.num_sampled)
    weights = [(share,) * len(node.token_ids) for node in tree.nodes]
    return TrainingSample(tree, advantages=[(0.0,) * len(row) for row in weights], weights=weights)
