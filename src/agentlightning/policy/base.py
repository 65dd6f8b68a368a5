"""The contract of a policy: an engine that learns, with sampling and training on the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError
from agentlightning.policy.config import Lora
from agentlightning.policy.losses import LossSetting
from agentlightning.policy.mismatch import MismatchSetting
from agentlightning.trajectory import FloatArray, TokenTree, TrainingSample

ScoreColumn = Literal["logprobs", "ref_logprobs", "values", "entropy", "average_logprobs"]
Sharing = Literal["auto", "rows", "merged", "shared"]
Columns = Mapping[str, Sequence[tuple[FloatArray, ...]]]
"""By name, for each tree a column as `TrainingSample` has them."""
Metrics = Mapping[str, float]
"""What an update or a step measures, by name."""


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How an update trains on its samples. Raises ConfigError for impossible ones.

    >>> from agentlightning.policy.base import UpdateOptions
    >>> UpdateOptions(loss="cispo", minibatches=2).token_budget is None
    True
    """

    loss: LossSetting = "ppo"
    """One or several, which add up."""
    minibatches: int = 1
    """The batch is divided by samples into that many optimiser steps, each over its share of the whole."""
    mismatch: MismatchSetting | None = None
    """Corrects the weights of losses against `proximal_logprobs` for what lies between these and the sampled ones;
    None: truncated importance sampling of tokens, where samples have the column."""
    average: float | None = None
    """With it, a moving average of the weights follows them at this rate (`weight_average`)."""
    token_budget: int | None = None
    """Bounds the tokens of one forward pass, padding included; None: `policy.token_budget`."""
    lr_factor: float = 1.0
    """Multiplies all learning rates."""
    sharing: Sharing = "auto"
    """How rows of a tree that begin alike are computed (`policy.update.packing`)."""

    def __post_init__(self) -> None:
        if self.minibatches < 1 or (self.token_budget is not None and self.token_budget < 1):
            raise ConfigError(f"minibatches={self.minibatches} and token_budget={self.token_budget} must be at least 1")


UPDATE = UpdateOptions()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a policy can do beside what every one must. It declares them; what it leaves out it lacks.

    >>> from agentlightning.policy.base import Capabilities
    >>> Capabilities(in_flight=True).separate
    False
    """

    in_flight: bool = False
    """Whether `train` and `load` accept `in_flight=True`."""
    separate: bool = False
    """Whether it trains other weights than those that sample, so that sampling continues while it trains
    (`SeparatePolicy`)."""
    starts_at_base: bool = False
    """Whether it trains adapters that began with no effect: the model below them, which `score` takes as the reference
    where none is given, is then the one that it started from."""
    lends_weights: bool = False
    """Whether its weights can be read in place (`weight_sync.transfer.WeightOwner`)."""
    adapters: Mapping[str, Lora] = field(default_factory=dict[str, Lora])
    """The adapters that are trained, by name; empty: all weights are."""


def capabilities_of(policy: object) -> Capabilities:
    """What a policy declares."""
    return getattr(policy, "capabilities", Capabilities())


class Policy(Engine, Protocol):
    """An engine that learns. Subclass it to inherit the defaults of the optional members.

    Answers in flight when `train` or `load` changes the weights are handled in one of two ways. Without `in_flight`
    there may be none: the caller holds back new calls and lets the running ones finish first
    (`gateway.local`). With `in_flight` they continue across the change and none fails: each token sampled
    after it, and its log-probability, is what the new weights give after all the tokens before it, whichever weights
    sampled those; `Sample.versions` counts the tokens of each version. From adapters on model servers they end on the
    version that they began with instead. Either way, an answer that begins after the
    change is sampled by the new weights alone, and nothing computed with the old ones (cached prefixes included) is
    reused for it.
    """

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None: unknown."""
        return None

    async def kv_cache_usage(self) -> float | None:
        """The share of the memory for keys and values that running answers use, the fullest server's where there are
        several; None: unknown."""
        return None

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beside the following. Default: nothing."""
        return Capabilities()

    async def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE, *, in_flight: bool = False
    ) -> Metrics:
        """One optimiser step over all samples; raises policy_version by one; returns metrics (loss, grad_norm, ...).

        Raises PolicyError if answers are in flight without `in_flight`, ConfigError if `in_flight` is not supported. An
        update that fails leaves the answers in flight as they were."""
        ...

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """Columns of every sampled token of each tree, at the temperature it was sampled with and under the present
        weights: `logprobs`, `entropy` (nats), `values`; `average_logprobs` under the moving average that `train` keeps
        with `average` (before the first such update, the present weights); and `ref_logprobs` under the model in
        `reference`, a model named as in `PolicyConfig.model`, with the same tokenizer and of any size. They go into a
        `TrainingSample`, and are those of its `adapter`. Changes no weights.

        Raises PolicyError for a column that the policy cannot give, naming what it lacks."""
        ...

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        """Write a checkpoint that `transformers` loads; with `training_state`, also all that a resume needs."""
        ...

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """Continue from a checkpoint saved with `training_state`: weights, optimiser, random state. The weights get a
        new policy_version: one more than the largest of the current one, the saved one and `above`. Raises as `train`
        does; a damaged or incompatible checkpoint is rejected before anything changes."""
        ...

    async def close(self) -> None: ...


class SeparatePolicy(ABC):
    """A policy with `Capabilities.separate`. Subclass it to inherit `train`, which is both of its steps."""

    @abstractmethod
    async def check_idle(self, in_flight: bool) -> None:
        """Raises PolicyError for answers in flight that may not be."""

    async def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE, *, in_flight: bool = False
    ) -> Metrics:
        """See `Policy.train`. Raises as `train_apart` and `publish_update` do."""
        await self.check_idle(in_flight)
        metrics = await self.train_apart(samples, options)
        return {**metrics, **await self.publish_update(in_flight=in_flight)}

    @abstractmethod
    async def train_apart(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        """`Policy.train`, without changing the weights that sample."""

    @abstractmethod
    async def publish_update(self, *, in_flight: bool = False) -> Metrics:
        """Let the weights that sample be those that were trained. Raises as `Policy.train` does; PolicyError where they
        cannot be replaced."""
