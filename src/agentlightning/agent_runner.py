"""The runner of a training run or an evaluation: made from its settings, with the agent loaded."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.config import RunnerConfig
from agentlightning.rollouts import RolloutConfig, attempt_secret
from agentlightning.runner import Runner
from agentlightning.server import listen, url_of
from agentlightning.store.base import LightningStoreBase

T = TypeVar("T")


def credentials() -> tuple[str, str]:
    """The access token of a run's own server and the secret of its attempts' keys: agents have neither, so that none
    can read or change what is not its own."""
    token = secrets.token_urlsafe(24)
    return token, attempt_secret(token)


def make_runner(
    config: RunnerConfig,
    store: LightningStoreBase,
    agent: Any,
    reward: Any | None,
    secret: str,
    *,
    redirect: bool = True,
    log: Path | None = None,
) -> Runner:
    return Runner(
        store,
        agent,
        secret=secret,
        reward=reward,
        redirect=redirect,
        concurrency=config.concurrency,
        hosts=config.hosts,
        fresh_process=config.fresh_process,
        env=config.env or None,
        hide=config.hide,
        cwd=config.cwd,
        log=log,
    )


async def load_agent(
    runner: Runner, stack: AsyncExitStack, host: str = "127.0.0.1", port: int = 0, *, policy: bool
) -> socket.socket:
    """Import the agent in its own process, and meanwhile, where there will be a `policy`, what is heavy in this one. It
    may make a client of its model already: the address that this leads to is taken, and returned."""
    listener = listen(host, port)
    stack.callback(listener.close)
    runner.server_url = url_of(host, listener.getsockname()[1])
    stack.push_async_callback(runner.stop)
    runner.start_hosts()
    loading = [asyncio.to_thread(import_module, "agentlightning.policy.local")] if policy else []
    await asyncio.gather(runner.load(), *loading)
    return listener


def rollout_config(config: RunnerConfig) -> RolloutConfig:
    return RolloutConfig(
        timeout_seconds=config.timeout_seconds,
        unresponsive_seconds=config.timeout_seconds,
        max_attempts=config.max_attempts,
    )


async def unless_it_ends(runner: Runner, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises the runner's error if that ends first."""
    working, ended = asyncio.ensure_future(work), asyncio.ensure_future(runner.wait())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await ended
        return await working
    finally:
        for task in (working, ended):
            task.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)
