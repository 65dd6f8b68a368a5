"""The settings of a policy: the model that learns, its adapters, critic and optimiser, and what samples from it.

Imports no torch, so that configuration can be read without it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from agentlightning.engine.base import AdapterTable
from agentlightning.engine.servers.config import EngineName, ServersConfig, smallest_lora_rank
from agentlightning.errors import ConfigError
from agentlightning.models import SHARED
from agentlightning.models.resolve import TINY
from agentlightning.util.kept_sets import MAX_SET
from agentlightning.util.plugins import Registry
from agentlightning.util.settings import AtLeastOne, PositiveShare, Section, by_type
from agentlightning.weight_sync.transfer import AUTO, DISK

OPENED = "agentlightning.policy.open:open_policy"
BACKENDS = Registry("backends", "backend", known={"local": OPENED, "fsdp": OPENED, "tinker": None})


# -- optimiser -------------------------------------------------------------------------------------------------------

LARGE_MODEL = 1.5e9
"""The number of weights beyond which the default learning rate no longer falls."""
LARGE_MODEL_LR = 1e-6
"""The default learning rate of reinforcement learning for such models."""
LR_EXPONENT = 0.7
"""How the default grows for smaller models: 1e-6 at 1.5e9 weights, 2.2e-6 at 0.5e9, 3e-4 at the demo's 0.4e6."""
SUPERVISED_FACTOR = 10.0
"""The default of supervised learning, as a multiple of that of reinforcement learning."""

Objective = Literal["reinforcement", "supervised"]


class OptimizerConfig(Section):
    """How gradients update weights.

    >>> agl.config.OptimizerConfig(lr=1e-5, schedule="cosine", total_steps=100).clip_norm
    1.0
    """

    type: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon: hidden matrices by Muon, everything else by AdamW."""
    lr: PositiveShare | None = None
    """The learning rate of AdamW: of all weights, or with `muon` of embeddings, head, norms and biases. None: chosen by
    the number of weights, see `default_lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled; on matrices only."""
    muon_lr: PositiveFloat = 0.02
    """The learning rate of Muon, scaled for each matrix by sqrt(max(1, rows / columns)) (Jordan et al. 2024)."""
    clip_norm: PositiveFloat | None = 1.0
    """The largest norm of the whole gradient; None leaves it as it is."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls, to 0 at `total_steps`."""
    total_steps: AtLeastOne | None = None
    """Optimiser steps of the whole run; needed unless the schedule is constant. A trainer fills it in."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises to its full value."""

    @model_validator(mode="after")
    def _check_schedule(self) -> OptimizerConfig:
        if self.total_steps is not None:
            self.check_warmup(self.total_steps)
        return self

    def check_warmup(self, total_steps: int) -> None:
        """Raises ConfigError if the warmup is as long as a run of `total_steps`."""
        if self.warmup_steps >= total_steps:
            raise ConfigError(
                f"optimizer.warmup_steps={self.warmup_steps} must be below total_steps={total_steps}; lower it, or"
                " train for more steps"
            )

    def factor(self, step: int) -> float:
        """The factor of the learning rates at optimiser step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant" or self.total_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    def completed(self, *, weights: int, objective: Objective, total_steps: int | None = None) -> OptimizerConfig:
        """These settings with defaults filled in for a model of that many weights. Raises ValidationError for settings
        that contradict one another, such as a warmup as long as the run."""
        filled = {
            "lr": self.lr if self.lr is not None else default_lr(weights, objective),
            "total_steps": self.total_steps if self.total_steps is not None else total_steps,
        }
        return OptimizerConfig.model_validate(self.model_dump() | filled)


def default_lr(weights: int, objective: Objective = "reinforcement") -> float:
    """The learning rate if none is set: small models need, and tolerate, far larger steps than large ones.

    1e-6 * (1.5e9 / weights) ** 0.7 for reinforcement learning, no less than 1e-6; ten times that for supervised
    learning; no more than 1; rounded to two digits.
    """
    lr = LARGE_MODEL_LR * max(1.0, LARGE_MODEL / max(1, weights)) ** LR_EXPONENT
    return float(f"{min(1.0, lr * (SUPERVISED_FACTOR if objective == 'supervised' else 1.0)):.1e}")


# -- adapters --------------------------------------------------------------------------------------------------------

BASE = "base"
"""The name that stands for the weights below all adapters."""
LR_FACTOR = 10.0
"""The default learning rate of an adapter, as a multiple of that of all weights (Schulman et al. 2025, "LoRA without
regret")."""


class Lora(Section):
    """Train a low-rank adapter in place of all weights (LoRA, arXiv 2106.09685).

    >>> agl.Lora(r=8, targets=("q_proj", "v_proj")).r
    8
    """

    type: Literal["lora"] = "lora"
    """Which kind of adapter this is."""
    r: AtLeastOne = 16
    """The rank: rows of A and columns of B."""
    alpha: PositiveFloat | None = None
    """What the adapter adds is multiplied by alpha / r. None: 2 r."""
    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The linear layers to change, by the end of their names: `("q_proj", "v_proj")`. None: all but the output head."""
    optimizer: OptimizerConfig | None = None
    """How this adapter is updated. None: as the algorithm's `optimizer` says. Without a learning rate it has ten times
    the default of training all weights."""

    @property
    def scale_numerator(self) -> float:
        """`alpha` with its default."""
        return 2.0 * self.r if self.alpha is None else self.alpha


AgentSetting = Annotated[Lora | Literal["frozen", "shared"], Field(union_mode="left_to_right")]
"""What the calls of an agent train: an adapter of its own, nothing, or what all `shared` agents train together."""


def adapters_of(lora: Lora | None, agents: Mapping[str, AgentSetting]) -> dict[str, Lora]:
    """The adapters by name: `SHARED` for the policy itself, and those of single agents. Empty: all weights are trained.

    Where other agents rely on the weights below, `shared` agents train a common adapter, so that those weights stay as
    they are. Raises ConfigError where nothing would be trained."""
    own = {name: setting for name, setting in agents.items() if isinstance(setting, Lora)}
    if reserved := sorted({SHARED, BASE} & own.keys()):
        raise ConfigError(f"the agent name {reserved[0]!r} is reserved for the policy's own weights; rename the agent")
    shared = not agents or SHARED in agents.values()
    if agents and not own and not shared:
        raise ConfigError(
            f"agents={dict(agents)} freezes every agent, so there is nothing to train; give one an adapter (Lora) or "
            'make it "shared"'
        )
    if lora is not None and not shared:
        raise ConfigError(
            f'policy.lora is the adapter of shared agents, and no agent of {sorted(agents)} is; make one "shared", or '
            "leave policy.lora out"
        )
    if lora is None and agents and shared and set(agents.values()) != {"shared"}:
        lora = Lora()
    return ({} if lora is None else {SHARED: lora}) | own


def adapter_table(model: str, agents: Mapping[str, AgentSetting], adapters: Collection[str]) -> AdapterTable:
    """What answers which agent: `MODEL:AGENT` one with an adapter of its own, and `MODEL:base`, the weights below a
    common adapter, those that are frozen or not listed."""
    views: dict[str, str | None] = {f"{model}:{name}": name for name in adapters if name != SHARED}
    base = f"{model}:{BASE}" if agents and SHARED in adapters else model
    if base != model:
        views[base] = None

    def name_of(agent: str, setting: AgentSetting) -> str:
        return f"{model}:{agent}" if isinstance(setting, Lora) else model if setting == "shared" else base

    names = {agent: name_of(agent, setting) for agent, setting in agents.items()}
    return AdapterTable(own=SHARED if SHARED in adapters else None, views=views, agents=names, others=base)


def check_servable(adapters: Mapping[str, Lora], servers: ServersConfig, kind: str) -> None:
    """Raises ConfigError for adapters that servers of this kind cannot get in the configured way, or cannot run."""
    if not adapters:
        return
    if servers.transfer not in (DISK, AUTO):
        raise ConfigError(
            f'transfer="{servers.transfer}" is for all weights; servers read adapters from the disk, so set '
            f'policy.servers.transfer = "{DISK}" or leave policy.lora and algorithm.agents out'
        )
    if kind == "vllm":
        smallest_lora_rank(max(lora.r for lora in adapters.values()))


# -- critic ----------------------------------------------------------------------------------------------------------

STEP = 0.1
"""The default learning rate times the size of the hidden states: about how far one step moves a value."""


class ValueHeadConfig(Section):
    """A critic on the hidden states of the policy."""

    type: Literal["linear", "mlp"] = "linear"
    """linear: one weight for each number of a hidden state; mlp: one hidden layer between."""
    hidden_size: AtLeastOne = 128
    """Units of the hidden layer of an mlp."""
    lr: PositiveFloat | None = None
    """Its learning rate, on the schedule of the policy's. None: 0.1 divided by the size of a hidden state, so that one
    step moves a value by about 0.1."""
    trains_body: bool = False
    """Whether the value loss also changes the policy's own weights. false: it trains the head alone, and the policy
    learns exactly what it would learn without it."""


ValueHeadSetting = Annotated[ValueHeadConfig | None, BeforeValidator(by_type)]
"""A table of settings, or the name of a type."""


# -- ranks -----------------------------------------------------------------------------------------------------------


def check_fed(processes: int, trees: int, settings: str) -> None:
    """Raises ConfigError for more ranks than the trees of a batch, each of which one rank computes. `settings` is where
    their number comes from."""
    if processes > trees:
        raise ConfigError(
            f"policy.processes={processes}: an update has {trees} trees at most ({settings}), each computed by one"
            f" process; use at most {trees} processes, or larger batches"
        )


# -- model -----------------------------------------------------------------------------------------------------------


def _text_of_path(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


ModelName = Annotated[str, BeforeValidator(_text_of_path)]


class ModelSettings(Section):
    """How a model is opened, trained or only served."""

    model: ModelName
    """See `PolicyConfig.model`."""
    name: str = "policy"
    """The model name that agents may use; the policy also answers calls for any other name."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    max_batch_size: AtLeastOne = 128
    """Answers sampled at the same time; further calls wait."""
    kv_cache_bytes: AtLeastOne = 4 << 30
    """Memory of the local engine for the keys and values of these answers; further requests wait. One answer always
    fits."""
    prefix_cache_bytes: NonNegativeInt = 1 << 30
    """Memory of the local engine for cached keys and values of earlier prompts and answers."""
    max_context: int | None = Field(default=None, ge=16)
    """Tokens of prompt and answer together; None: what the model has."""
    tool_calls: str | None = None
    """How the model writes tool calls: a format's name, such as hermes, llama3 or harmony (docs/guides/offline.md).
    None: as its chat template shows; where it has no place for tools, calls or results, all of them stand in the
    messages, in Hermes' format. "messages" writes them so with any template, "template" with none."""
    lora: Lora | None = None
    """Train a low-rank adapter (LoRA) in place of all weights. None: all weights are trained."""
    max_kept_tokens: int = Field(default=1024, ge=0, le=MAX_SET)
    """The most tokens that top-p and top-k sampling may keep at a position of an answer that is trained: the sets are
    recorded, as the policy's probabilities are those over them. An answer with a larger set is refused, and counted.
    0: all such answers are."""
    value_head: ValueHeadSetting = None
    """A critic on the hidden states of the model, which the loss "value" trains: "linear", "mlp", or a table. None: no
    critic."""
    gradient_checkpointing: bool = False
    """Compute all layers but the last again in the backward pass instead of storing their activations: far less memory
    for long contexts, about a third more time."""
    kind: Annotated[str, BeforeValidator(BACKENDS.named)] = "local"
    """What trains: local, the trainer's own process; fsdp, several processes that divide weights and batches
    (docs/guides/operations/scaling.md); tinker, a server that speaks the Tinker API (section tinker); or a backend of
    your own."""
    processes: AtLeastOne = 1
    """With fsdp, how many processes train, on all machines together. Unless torchrun has started them, the trainer
    starts the others on its own machine."""
    rank_timeout_seconds: PositiveFloat = 600.0
    """With fsdp, how long these processes wait for one another."""


class LocalPolicyConfig(ModelSettings):
    """A model to open, which is not `tiny`, and the resources it may use."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """See `PolicyConfig.dtype`."""
    threads: AtLeastOne = 1
    """CPU threads of torch."""
    prefill_tokens: AtLeastOne = 2048
    """Prompt tokens computed in one step, before running answers get their next token."""
    seed: int = 0
    """Of samples without a seed of their own."""
    optimizer: OptimizerConfig = OptimizerConfig()
    agents: dict[str, AgentSetting] = Field(default={})
    """What the calls of each agent train. Empty: all train the policy itself."""
    served: bool = False
    """Whether model servers sample."""
    objective: Objective = "reinforcement"
    """What it is trained for, which decides the default learning rate."""

    @property
    def sampling_device(self) -> str:
        """Where this process has its copy of the weights: on the CPU where model servers sample."""
        return "cpu" if self.served and self.kind == "fsdp" else self.device

    @property
    def adapters(self) -> dict[str, Lora]:
        """See `adapters_of`."""
        return adapters_of(self.lora, self.agents)


class TinkerConfig(Section):
    """The server of the Tinker API that trains a policy, and what it trains.

    >>> agl.config.TinkerConfig(url="http://trainer.example:4747", base_model="Qwen/Qwen3-8B").key_env
    'TINKER_API_KEY'
    """

    url: str | None = None
    """The server's address. None: TINKER_BASE_URL, else the hosted service of the `tinker` package."""
    base_model: str | None = None
    """The name of the model there. None: that of `policy.model`, whose tokenizer and chat template are used here."""
    key_env: str = "TINKER_API_KEY"
    """The environment variable that holds the API key, which begins with `tml-`."""
    attention: bool = True
    """Whether the adapter changes attention layers."""
    mlp: bool = True
    """Whether it changes MLP layers."""
    head: bool = False
    """Whether it changes the output head."""
    timeout_seconds: PositiveFloat = 1800.0
    """A request that takes longer has failed, and ends the run, which can be resumed."""
    unreachable_seconds: PositiveFloat = 60.0
    """How long the server may be unreachable while a request waits for it. Needs `url` or TINKER_BASE_URL."""
    telemetry: bool = False
    """Whether the `tinker` package may send the server reports on its use."""


class WeightsConfig(Section):
    """Where each version of the weights of a run is published, for hosts that pull it (`agl weights pull`).

    >>> agl.config.WeightsConfig(url="s3://bucket/run-7").full_every
    20
    """

    url: str | None = None
    """A URL of fsspec: file:///DIR, s3://BUCKET/DIR, gs://BUCKET/DIR ... None: weights are not published."""
    full_every: AtLeastOne = 20
    """After so many versions comes a full one; those between hold only what changed since the one before."""
    keep_full: AtLeastOne = 2
    """The newest full versions that are kept, with all that follow the older of them."""


class PolicyConfig(ModelSettings):
    """The model that learns, and what samples from it.

    >>> agl.config.PolicyConfig(model="path/to/model").model
    'path/to/model'
    """

    model: ModelName = TINY
    """A directory that transformers loads, a `.gguf` file, a short name such as `smollm2-135m`, or a hub name
    (docs/get-started/models.md). `tiny`: a small new model with random weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights that are sampled from. bfloat16 samples with half the memory; it is trained through master copies
    in float32, which cost 4 bytes a weight more. auto: bfloat16 for models of 50M weights or more where the processor
    or the GPU computes in it, else float32."""
    threads: AtLeastOne | None = None
    """CPU threads of torch. None: all cores for models of 50M weights or more, if a product of its size is then faster
    at the start of the run, else 1. Sampling uses one of them for as few rows as more would hardly speed up. More than
    one is slower whenever the machine is busy with anything else."""
    token_budget: int = Field(default=8192, ge=64)
    """Tokens of one micro-batch in training."""
    in_flight: bool = False
    """Answers in progress continue across an update, each token with the version that sampled it. false: they finish
    first."""
    drain_seconds: NonNegativeFloat | None = None
    """Seconds that an update waits for answers in progress before the rest continue across it. None: until they
    finish."""
    backend: dict[str, Any] = Field(default={})
    """The settings of a backend of your own."""
    engine: EngineName = "local"
    """What samples: local, the training process; vllm, sglang or an engine of your own, servers that get the weights
    after each update."""
    servers: ServersConfig = ServersConfig()
    """Model servers: their addresses, or how to start them."""
    weights: WeightsConfig = WeightsConfig()
    """Where each version of the weights is published for other hosts."""
    tinker: TinkerConfig = TinkerConfig()
    """The server that trains and samples with kind "tinker"."""

    @model_validator(mode="before")
    @classmethod
    def _without_address(cls, values: Any) -> Any:
        """Runs of development versions wrote `address = "none"`; torchrun says now where ranks meet."""
        if isinstance(values, dict) and values.get("address", "") in (None, "none"):
            return {name: value for name, value in cast(dict[str, Any], values).items() if name != "address"}
        return values

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.backend and self.kind in BACKENDS:
            raise ValueError(f'backend holds the settings of one of your own, and kind is "{self.kind}"; leave it out')
        for name in ("processes", "rank_timeout_seconds") if self.kind != "fsdp" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name}={getattr(self, name)} is for several processes: set policy.kind = "fsdp"')
        if self.kind == "tinker":
            self._check_tinker()
        return self

    def _check_tinker(self) -> None:
        if self.model == TINY:
            raise ValueError(
                'kind="tinker" trains a model that the server has: name it by model, whose tokenizer is used here, and'
                " tinker.base_model"
            )
        if self.weights.url is not None:
            raise ValueError('kind="tinker" keeps its weights on its server; leave out weights.url')
        if self.engine != "local":
            raise ValueError(f'kind="tinker" samples on its own server; leave out engine="{self.engine}"')
