"""Configuration of model servers, without the code that runs them."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, model_validator

from agentlightning.errors import ConfigError
from agentlightning.util.plugins import Registry
from agentlightning.util.settings import AtLeastOne, Section
from agentlightning.weight_sync.transfer import AUTO, DISK, SENDERS

ENGINES = Registry(
    "engines",
    "engine",
    "agentlightning.engine.servers.clients.http:HttpModelServer",
    {
        "local": "agentlightning.engine.local.scheduler:ContinuousBatcher",
        "vllm": "agentlightning.engine.servers.clients.vllm:VllmServer",
        "sglang": None,
    },
)
"""What samples: `local`, the process that trains, and clients of model servers."""
EngineName = Annotated[str, BeforeValidator(ENGINES.named)]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a pool copes with failures."""

    retries: int = 2
    """How often a call is repeated."""
    wait_seconds: float = 120.0
    """How long a call waits for a server while none is up."""
    health_seconds: float = 5.0
    """Interval between health checks of each server."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank may be (0.32)."""


def smallest_lora_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` for adapters of this rank. Raises ConfigError for one that vLLM cannot serve."""
    if rank > LORA_RANKS[-1]:
        raise ConfigError(f"r={rank} is more than the {LORA_RANKS[-1]} that vLLM serves; use a smaller r")
    return next(each for each in LORA_RANKS if each >= rank)


class ServersConfig(Section):
    """The servers that sample from the policy."""

    urls: tuple[str, ...] = ()
    """Running servers to join. Empty: vLLM servers are started on this machine."""
    token_env: str | None = None
    """Environment variable with the token of the joined servers."""
    count: AtLeastOne = 1
    """Number of servers to start."""
    command: str = "vllm"
    """Program or command line that starts vLLM; `serve` and the options follow."""
    args: tuple[str, ...] = ()
    """Further options of `vllm serve`, such as `--tensor-parallel-size=2`."""
    env: dict[str, str] = Field(default={})
    """Environment variables of started servers."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each started server, such as `["0,1", "2,3"]`. Empty: every server sees all devices."""
    start_seconds: PositiveFloat = 600.0
    """Time limit for a server to start listening."""
    timeout_seconds: PositiveFloat = 3600.0
    """A server that sends nothing for this long while it samples has failed. An unstreamed answer comes whole."""
    retries: NonNegativeInt = 2
    """How often a call is repeated after a server failure."""
    wait_seconds: PositiveFloat = 600.0
    """How long a call waits while no server is up."""
    weights: str | None = None
    """Directory for new weights that this machine and the servers see under the same path; None: the run's own."""
    transfer: str = "disk"
    """How new weights reach vLLM servers: `disk`; `nccl`, from the trainer's GPU to theirs; `ipc`, on one GPU that a
    server shares with the trainer; `auto`: without the disk if servers are started here and `devices` assigns their
    GPUs. A server whose transfers fail gets them from the disk."""
    tolerance: PositiveFloat | None = None
    """Largest difference between the servers' log-probability of a token and the trainer's before an update counts as
    failed. None: 0.01 for float32, 0.1 for bfloat16, whose rounding error is some hundredths."""

    @model_validator(mode="after")
    def _validate(self) -> ServersConfig:
        if self.transfer not in (AUTO, DISK, *SENDERS):
            raise ValueError(f"transfer={self.transfer!r}: choose one of {', '.join([DISK, AUTO, *SENDERS])}")
        if self.devices and len(self.devices) != self.count:
            raise ValueError(f"devices names those of {len(self.devices)} servers, count={self.count}; give one each")
        if self.urls and (self.devices or self.args or self.env):
            raise ValueError("args, env and devices are for servers that are started here; leave them out with urls")
        return self

    def with_absolute_paths(self) -> ServersConfig:
        """The same configuration, independent of the working directory."""
        program, *words = shlex.split(self.command) or [""]
        if "/" in program:
            program = str(Path(program).absolute())  # Not resolved: programs of an environment are links.
        weights = None if self.weights is None else str(Path(self.weights).resolve())
        return self.model_copy(update={"command": shlex.join([program, *words]), "weights": weights})

    def with_lora(self, adapters: int, rank: int | None = None, versions: int = 2) -> ServersConfig:
        """The same servers; started ones take this many adapters of up to this rank (None: the server's default) in so
        many `versions`: calls in progress may still use the one before. Options in `args` come first."""
        if self.urls or not adapters:
            return self
        wanted = {"--max-lora-rank": smallest_lora_rank(rank)} if rank else {}
        wanted["--max-loras"] = versions * adapters
        given = {word.partition("=")[0] for word in self.args}
        options = [f"{name}={value}" for name, value in wanted.items() if name not in given]
        enable = [] if "--enable-lora" in given else ["--enable-lora"]
        return self.model_copy(update={"args": (*self.args, *enable, *options)})

    def check(self, kind: str) -> None:
        """Raises ConfigError for settings that cannot work on this machine, before anything is started."""
        if self.token_env and not self.token:
            raise ConfigError(f"token_env={self.token_env!r}: that environment variable is not set")
        if self.urls:
            return
        if kind != "vllm":
            raise ConfigError(f"{kind} servers are joined, not started: give their addresses in urls")
        program = shlex.split(self.command)[:1]
        if not program or shutil.which(program[0]) is None:
            raise ConfigError(
                f"command={self.command!r} is no program here; install vLLM, in an environment of its own if need be, "
                "and say where its `vllm` is, or give the addresses of servers in urls"
            )

    @property
    def token(self) -> str | None:
        """The token of the joined servers."""
        return os.environ.get(self.token_env) if self.token_env else None

    @property
    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(retries=self.retries, wait_seconds=self.wait_seconds)


class ServedModel(Section):
    """A model that servers sample from and that is not trained here."""

    model: str
    """The model's directory, or its name on the hub: its tokenizer renders the conversations, and started servers load
    it."""
    engine: EngineName = "vllm"
    """Kind of its servers."""
    servers: ServersConfig = ServersConfig()
    """Its servers, joined or started here."""
    dtype: str = "auto"
    """Of the weights in started servers."""
    max_context: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and answer together; None: the servers' own limit."""
    tool_calls: str | None = None
    """The format of its tool calls, such as `hermes`; None: detected from its chat template. "messages" and
    "template" as in `policy.tool_calls`."""

    @model_validator(mode="after")
    def _reject_training_settings(self) -> ServedModel:
        for name in ("transfer", "weights", "tolerance"):
            if getattr(self.servers, name) != ServersConfig.model_fields[name].default:
                raise ValueError(f"servers.{name} is about new weights, and {self.model} is not trained; leave it out")
        return self

    adapters: dict[str, str] = Field(default={})
    """LoRA adapters, each a model of its own: name -> directory."""

    def with_adapters(self) -> ServersConfig:
        """Its servers; started ones accept its adapters."""
        return self.servers.with_lora(len(self.adapters), versions=1)
