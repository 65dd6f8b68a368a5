"""Opens the pool of servers that a configuration describes: joins running ones, or starts vLLM processes."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from agentlightning.chat.base import ChatFormat
from agentlightning.chat.hf import load_chat_format
from agentlightning.engine.base import Engine
from agentlightning.engine.servers.clients.vllm import VllmProcess, VllmServer
from agentlightning.engine.servers.config import ENGINES, ServedModel, ServersConfig
from agentlightning.engine.servers.pool import Replica, ReplicaPool
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.resolve import resolve_model
from agentlightning.transport import Transport
from agentlightning.weight_sync.transfer import AUTO, DISK, SENDERS, SERVER_ENVIRONMENT, VISIBLE_DEVICES

log = logging.getLogger(__name__)


async def open_served_model(config: ServedModel, name: str, stack: AsyncExitStack, logs: Path) -> dict[str, Engine]:
    """The model as `name`, and its adapters; the stack closes them. Raises as `open_servers`, and PolicyError if a
    server rejects an adapter."""
    directory = await asyncio.to_thread(resolve_model, config.model)
    servers = await open_servers(
        config.with_adapters(),
        await load_chat_format(directory, config.tool_calls),
        kind=config.engine,
        model=Path(directory),
        name=name,
        dtype=config.dtype,
        max_context=config.max_context,
        logs=logs,
    )
    stack.push_async_callback(servers.close)
    adapters = {each: await servers.load_adapter(each, Path(path)) for each, path in config.adapters.items()}
    return {name: servers, **adapters}


async def open_servers(
    config: ServersConfig,
    chat: ChatFormat,
    *,
    kind: str = "vllm",
    model: Path | None = None,
    name: str | None = None,
    dtype: str = "auto",
    max_context: int | None = None,
    weights_change: bool = False,
    logs: Path = Path(),
    transfer: str = DISK,
    device: str = "cpu",
    token: str | None = None,
) -> ReplicaPool:
    """A pool of the servers of `config`.

    Running servers of `config.urls` are joined. Without them, vLLM servers are started with `model`, as `name`; they
    log to files in `logs` and end with the pool. With a `transfer` (a key of `SENDERS`) they get new weights from a
    trainer on `device` without the disk. `token` is that of the joined servers, instead of the configured one. Raises
    ConfigError, ServerError if one cannot be started, and as `ReplicaPool.open` does."""
    config.check(kind)
    transport, replicas = Transport(), list[Replica]()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        if config.urls:
            client, token = ENGINES.find(kind), token or config.token
            replicas += [
                Replica(client(transport, url, token=token, seconds=config.timeout_seconds)) for url in config.urls
            ]
        elif model is None:
            raise ConfigError("no model to start servers with; give its directory, or the addresses of servers in urls")
        else:
            transfer_args = () if transfer == DISK else (f'--weight-transfer-config={{"backend": "{transfer}"}}',)
            visible = [{VISIBLE_DEVICES: each} for each in config.devices] or [{}] * config.count
            for index, devices in enumerate(visible):
                process = VllmProcess(
                    transport,
                    model=model,
                    name=name or "policy",
                    log=logs / f"vllm-{index}.log",
                    command=shlex.split(config.command),
                    args=(*config.args, *transfer_args),
                    env={**SERVER_ENVIRONMENT.get(transfer, {}), **config.env, **devices},
                    dtype=dtype,
                    max_context=max_context,
                    seconds=config.start_seconds,
                )
                stack.push_async_callback(process.close)
                server = VllmServer(transport, process.url, seconds=config.timeout_seconds)
                replicas.append(Replica(server, process))
            await asyncio.gather(*(replica.process.restart(None) for replica in replicas if replica.process))
        if transfer != DISK:
            await _connect_senders(replicas, transfer, device, stack, required=config.transfer != AUTO)
        pool = await ReplicaPool.open(
            replicas,
            chat,
            transport,
            model=name,
            max_context=max_context,
            retry_policy=config.retry_policy,
            weights_change=weights_change,
        )
        stack.pop_all()
    return pool


async def _connect_senders(
    replicas: Sequence[Replica], transfer: str, device: str, stack: AsyncExitStack, *, required: bool
) -> None:
    """Connect the servers' workers with senders, which the stack aborts. Raises ConfigError or PolicyError if one
    cannot connect; unless `required`, that server gets its weights from the disk instead."""
    connecting: list[partial[Awaitable[None]]] = []
    for replica in replicas:
        assert isinstance(replica.server, VllmServer)
        replica.sender = SENDERS[transfer](device)
        stack.callback(replica.sender.abort)
        connecting.append(partial(replica.server.connect, replica.sender))
    errors = await asyncio.gather(*(connect() for connect in connecting), return_exceptions=not required)
    for replica, error in zip(replicas, errors, strict=True):
        if error is None:
            continue
        if not isinstance(error, PolicyError | ConfigError):
            raise error
        log.warning("weights reach %s through the disk: %s", replica.url, error)
        replica.sender = None
        if replica.process is not None:  # Its workers may wait for us forever.
            await replica.process.restart(None)
