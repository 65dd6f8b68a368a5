"""Model servers by configuration: which are joined, how ours are started, and the engine over them."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import Engine
from agentlightning.engine.servers.base import Backend
from agentlightning.engine.servers.pool import Replicas
from agentlightning.engine.servers.replica import Patience, Replica, Transfer
from agentlightning.engine.servers.sglang import SGLangServer
from agentlightning.engine.servers.vllm import VllmServer
from agentlightning.engine.servers.vllm_process import Launch, VllmChild
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.transport import Transport, open_transport
from agentlightning.weight_sync.select import AUTO, COURIERS, DISK, environment

log = logging.getLogger(__name__)

DEVICES = "CUDA_VISIBLE_DEVICES"


class ServersConfig(BaseModel):
    """The servers that sample from the policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    urls: tuple[str, ...] = ()
    """Servers that are running, to join. None given: vLLM servers are started on this machine."""
    token_env: str | None = None
    """Environment variable that holds the token the joined servers want."""
    count: int = Field(default=1, ge=1)
    """How many servers to start."""
    command: str = "vllm"
    """What starts vLLM: the program, or a command line; `serve` and the options follow."""
    args: tuple[str, ...] = ()
    """Further options of `vllm serve`, such as `--tensor-parallel-size=2`."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment variables of the servers we start."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server we start, such as `["0,1", "2,3"]`. None given: all see all."""
    start_seconds: float = Field(default=600.0, gt=0)
    """How long a server may take until it listens."""
    timeout_seconds: float = Field(default=3600.0, gt=0)
    """A server that says nothing for so long while it draws has failed. An answer that nobody streams comes whole."""
    retries: int = Field(default=2, ge=0)
    """How often a call whose server failed is drawn again."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """How long a call waits where no server is up."""
    weights: str | None = None
    """Directory that this machine and the servers see under the same path, for new weights; None: the run's own."""
    transfer: str = "disk"
    """How new weights come to vLLM servers: `disk`; `nccl`, from the trainer's GPU to theirs; `ipc`, on one GPU that a
    server shares with the trainer; `auto`: without the disk wherever servers are started here and `devices` says which
    GPU is whose. A server where a transfer fails gets them from the disk."""
    tolerance: float | None = Field(default=None, gt=0)
    """How far the servers' log-probability of a token may be from the trainer's before an update counts as failed.
    None: 0.01 for float32, 0.1 for bfloat16, whose rounding makes some hundredths."""

    @model_validator(mode="after")
    def _fits(self) -> ServersConfig:
        if self.transfer not in (AUTO, DISK, *COURIERS):
            raise ValueError(f"transfer={self.transfer!r}: choose one of {', '.join([DISK, AUTO, *COURIERS])}")
        if self.devices and len(self.devices) != self.count:
            raise ValueError(f"devices names those of {len(self.devices)} servers, count={self.count}; give one each")
        if self.urls and (self.devices or self.args or self.env):
            raise ValueError("args, env and devices are for servers that are started here; leave them out with urls")
        return self

    def with_absolute_paths(self) -> ServersConfig:
        """The same, from whatever directory it is used."""
        program, *words = shlex.split(self.command) or [""]
        if "/" in program:
            program = str(Path(program).absolute())  # Not resolved: an environment's programs are links.
        weights = None if self.weights is None else str(Path(self.weights).resolve())
        return self.model_copy(update={"command": shlex.join([program, *words]), "weights": weights})

    def check(self, kind: str) -> None:
        """Raises ConfigError for what cannot work on this machine, before anything is started."""
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
        """What the joined servers want."""
        return os.environ.get(self.token_env) if self.token_env else None

    @property
    def patience(self) -> Patience:
        return Patience(retries=self.retries, wait_seconds=self.wait_seconds)


class ServedModel(BaseModel):
    """A model that servers sample from and that nobody here trains."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str
    """The model's directory, or its name on the hub: its tokenizer writes the conversations, and servers we start load
    it."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """What its servers are."""
    servers: ServersConfig = Field(default_factory=ServersConfig)
    """Its servers: joined, or started here."""
    dtype: str = "auto"
    """Of the weights, in servers we start."""
    max_context: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; None: what the servers have."""
    tool_calls: str | None = None
    """The format of its tool calls, such as `hermes` or `mistral`; None: as its chat template shows."""

    @model_validator(mode="after")
    def _nobody_trains_it(self) -> ServedModel:
        for name in ("transfer", "weights", "tolerance"):
            if getattr(self.servers, name) != ServersConfig.model_fields[name].default:
                raise ValueError(f"servers.{name} is about new weights, and nobody trains {self.model}; leave it out")
        return self

    adapters: dict[str, str] = Field(default_factory=dict[str, str])
    """LoRA adapters on it, each a model of its own: name -> directory."""

    def with_adapters(self) -> ServersConfig:
        """Its servers; those we start take its adapters."""
        if not self.adapters or self.servers.urls or "--enable-lora" in self.servers.args:
            return self.servers
        args = (*self.servers.args, "--enable-lora", f"--max-loras={len(self.adapters)}")
        return self.servers.model_copy(update={"args": args})

    async def open(self, name: str, stack: AsyncExitStack, logs: Path) -> dict[str, Engine]:
        """The model as `name`, and its adapters; the stack closes them. Raises as `open_servers`, and PolicyError
        where a server refuses an adapter."""
        servers = await open_servers(
            self.with_adapters(),
            await find_chat(self.model, self.tool_calls),
            kind=self.engine,
            model=Path(self.model),
            name=name,
            dtype=self.dtype,
            max_context=self.max_context,
            logs=logs,
        )
        stack.push_async_callback(servers.close)
        adapters = {each: await servers.load_adapter(each, Path(path)) for each, path in self.adapters.items()}
        return {name: servers, **adapters}


async def open_servers(
    config: ServersConfig,
    chat: ChatFormat,
    *,
    kind: Literal["vllm", "sglang"] = "vllm",
    model: Path | None = None,
    name: str | None = None,
    dtype: str = "auto",
    max_context: int | None = None,
    weights_change: bool = False,
    logs: Path = Path(),
    transfer: str = DISK,
    device: str = "cpu",
) -> Replicas:
    """The engine over the servers of `config`.

    With `config.urls` they are joined. Else vLLM servers are started with `model`, as `name`, and write to files in
    `logs`; they end with the engine. With a `transfer` (a key of `transfer.choice.COURIERS`) they take new weights from
    a trainer on `device` without the disk. Raises ConfigError, ServerError where one cannot be started, and as
    `Replicas.open` does."""
    config.check(kind)
    transport = open_transport()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        if config.urls:
            replicas = [Replica(_backend(kind, transport, config, url)) for url in config.urls]
        else:
            launches = _launches(config, model, name, dtype, max_context, logs, transfer)
            replicas = await _start(launches, config, transport, stack)
        if transfer != DISK:
            await _join(replicas, transfer, device, stack, required=config.transfer != AUTO)
        engine = await Replicas.open(
            replicas,
            chat,
            transport,
            model=name,
            max_context=max_context,
            patience=config.patience,
            weights_change=weights_change,
        )
        stack.pop_all()
    return engine


def _backend(kind: str, transport: Transport, config: ServersConfig, url: str) -> Backend:
    server = VllmServer if kind == "vllm" else SGLangServer
    return server(transport, url, token=config.token, seconds=config.timeout_seconds)


def _launches(
    config: ServersConfig,
    model: Path | None,
    name: str | None,
    dtype: str,
    max_context: int | None,
    logs: Path,
    transfer: str,
) -> list[Launch]:
    if model is None:
        raise ConfigError("no model to start servers with; give its directory, or the addresses of servers in urls")
    return [
        Launch(
            model=model,
            name=name or "policy",
            log=logs / f"vllm-{index}.log",
            command=shlex.split(config.command),
            args=(*config.args, *_receiving(transfer)),
            env={**environment(transfer), **config.env, **({DEVICES: config.devices[index]} if config.devices else {})},
            dtype=dtype,
            max_context=max_context,
            seconds=config.start_seconds,
        )
        for index in range(config.count)
    ]


def _receiving(transfer: str) -> tuple[str, ...]:
    return () if transfer == DISK else (f'--weight-transfer-config={{"backend": "{transfer}"}}',)


async def _join(
    replicas: Sequence[Replica], transfer: str, device: str, stack: AsyncExitStack, *, required: bool
) -> None:
    """Have their workers meet us. Raises ConfigError or BackendError where one cannot; where it is not `required` that
    server gets weights from the disk. The stack calls it off."""
    for replica in replicas:
        assert isinstance(replica.backend, VllmServer)
        replica.transfer = Transfer(replica.backend, COURIERS[transfer](device))
        stack.callback(replica.transfer.courier.abort)
    await asyncio.gather(*(_meet(replica, required) for replica in replicas))


async def _meet(replica: Replica, required: bool) -> None:
    if replica.transfer is None:
        return
    try:
        await replica.transfer.receiver.join(replica.transfer.courier)
    except (PolicyError, ConfigError) as error:
        if required:
            raise
        log.warning("weights go to %s by the disk: %s", replica.backend.url, error)
        replica.transfer = None
        if replica.child is not None:  # Its workers may wait for us for ever.
            await replica.child.restart(None)


async def _start(
    launches: Sequence[Launch], config: ServersConfig, transport: Transport, stack: AsyncExitStack
) -> list[Replica]:
    starting = [asyncio.create_task(VllmChild.start(launch, transport)) for launch in launches]
    try:
        children = await asyncio.gather(*starting)
    except BaseException:
        for task in starting:
            task.cancel()
        for child in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(child, VllmChild):
                await child.close()
        raise
    for child in children:
        stack.push_async_callback(child.close)
    servers = [VllmServer(transport, child.url, seconds=config.timeout_seconds) for child in children]
    return [Replica(server, child) for server, child in zip(servers, children, strict=True)]


async def find_chat(model: str | Path, tool_calls: str | None = None) -> ChatFormat:
    """The chat format of a model's tokenizer; `tool_calls` as in `ServedModel`. Raises ConfigError where there is
    none."""
    return await asyncio.to_thread(_load_chat, str(model), tool_calls)


def _load_chat(model: str, tool_calls: str | None) -> ChatFormat:
    from transformers import AutoTokenizer

    from agentlightning.chat.hf import HFChatFormat

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model} holds no tokenizer that transformers loads: {error}") from error
    return HFChatFormat(tokenizer, tool_calls=tool_calls)
