"""The settings of the policy of a training run. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from agentlightning.engine.servers.config import ENGINES, ServersConfig
from agentlightning.models.resolve import TINY
from agentlightning.policy.fsdp.config import RanksConfig, parse_address
from agentlightning.policy.local_config import ModelName, ModelSettings
from agentlightning.util.plugins import Registry
from agentlightning.util.settings import Named, Section

OPENED: Final = "agentlightning.policy.open:open_policy"
BACKENDS = Registry("backends", "backend", known={"local": OPENED, "fsdp": OPENED, "tinker": None})


class TinkerConfig(Section):
    """The server of the Tinker API that trains a policy, and what it trains.

    >>> agl.TinkerConfig(url="http://trainer.example:4747", base_model="Qwen/Qwen3-8B").key_env
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
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """A request that takes longer has failed, and ends the run, which can be resumed."""
    unreachable_seconds: float = Field(default=60.0, gt=0)
    """How long the server may be unreachable while a request waits for it. Needs `url` or TINKER_BASE_URL."""
    telemetry: bool = False
    """Whether the `tinker` package may send the server reports on its use."""


class WeightsConfig(Section):
    """Where each version of the weights of a run is published, for hosts that pull it (`agl weights pull`).

    >>> agl.WeightsConfig(url="s3://bucket/run-7").full_every
    20
    """

    url: str | None = None
    """A URL of fsspec: file:///DIR, s3://BUCKET/DIR, gs://BUCKET/DIR ... None: weights are not published."""
    full_every: int = Field(default=20, ge=1)
    """After so many versions comes a full one; those between hold only what changed since the one before."""
    keep_full: int = Field(default=2, ge=1)
    """The newest full versions that are kept, with all that follow the older of them."""


class PolicyConfig(ModelSettings):
    """The model that learns, and what samples from it.

    >>> agl.PolicyConfig(model="path/to/model").model
    'path/to/model'
    """

    model: ModelName = TINY
    """A directory that transformers loads, a `.gguf` file, a short name such as `smollm2-135m`, or a hub name
    (docs/get-started/models.md). `tiny`: a small new model with random weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights that are sampled from. bfloat16 samples with half the memory; it is trained through master copies
    in float32, which cost 4 bytes a weight more. auto: bfloat16 for models of 50M weights or more where the processor
    or the GPU computes in it, else float32."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch. None: all cores for models of 50M weights or more, if a product of its size is then faster
    at the start of the run, else 1. More than one is slower whenever the machine is busy with anything else."""
    token_budget: int = Field(default=8192, ge=64)
    """Tokens of one micro-batch in training."""
    in_flight: bool = False
    """Answers in progress continue across an update, each token with the version that sampled it. false: they finish
    first."""
    drain_seconds: float | None = Field(default=None, ge=0)
    """Seconds that an update waits for answers in progress before the rest continue across it. None: until they
    finish."""
    kind: Annotated[str, Named(BACKENDS)] = "local"
    """What trains: local, the trainer's own process; fsdp, several processes that divide weights and batches
    (docs/guides/operations/scaling.md); tinker, a server that speaks the Tinker API (section tinker); or a backend of
    your own."""
    backend: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The settings of a backend of your own."""
    processes: int = Field(default=1, ge=1)
    """With fsdp, how many processes train, on all machines together."""
    address: str | None = None
    """With fsdp, HOST:PORT where the trainer waits for these processes, which are started elsewhere and know the secret
    in AGL_RANK_TOKEN. None: it starts them on its own machine."""
    rank_timeout_seconds: float = Field(default=600.0, gt=0)
    """With fsdp, how long the trainer waits for the processes to join, and each of them for another."""
    engine: Annotated[str, Named(ENGINES)] = "local"
    """What samples: local, the training process; vllm, sglang or an engine of your own, servers that get the weights
    after each update."""
    servers: ServersConfig = Field(default_factory=ServersConfig)
    """Model servers: their addresses, or how to start them."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """Where each version of the weights is published for other hosts."""
    tinker: TinkerConfig = Field(default_factory=TinkerConfig)
    """The server that trains and samples with kind "tinker"."""

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.backend and self.kind in BACKENDS:
            raise ValueError(f'backend holds the settings of one of your own, and kind is "{self.kind}"; leave it out')
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.kind != "fsdp":
            for name in ("processes", "address", "rank_timeout_seconds"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f'{name}={getattr(self, name)} is for several processes: set policy.kind = "fsdp"')
        elif self.address is not None:
            parse_address(self.address)
        return self

    @model_validator(mode="after")
    def _check_tinker(self) -> Self:
        if self.kind != "tinker":
            return self
        if self.model == TINY:
            raise ValueError(
                'kind="tinker" trains a model that the server has: name it by model, whose tokenizer is used here, and'
                " tinker.base_model"
            )
        if self.weights.url is not None:
            raise ValueError('kind="tinker" keeps its weights on its server; leave out weights.url')
        if self.engine != "local":
            raise ValueError(f'kind="tinker" samples on its own server; leave out engine="{self.engine}"')
        return self

    @property
    def ranks(self) -> RanksConfig | None:
        """The processes that train; None: the trainer's own, or a server."""
        if self.kind != "fsdp":
            return None
        return RanksConfig(
            processes=self.processes,
            address=self.address,
            timeout_seconds=self.rank_timeout_seconds,
            device=self.device,
        )
