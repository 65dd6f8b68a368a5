"""The runner of a training run or an evaluation: made from its settings, with its agent loaded."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentlightning.attempt_address import attempt_secret
from agentlightning.config import RunnerConfig, TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.rollouts import PRIVATE_QUEUE, RolloutConfig
from agentlightning.runner import Runner
from agentlightning.server.app import is_loopback, listen, url_of
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.client import LightningStoreClient

T = TypeVar("T")

NO_AGENT = "no agent: give --agent, set agent = 'module:name' in the configuration, or pass one to fit()"
IDLE_SECONDS = 10.0
"""The time that rollouts wait for a runner elsewhere before the run reports that there is none."""


def credentials(shared: LightningStoreBase | None = None) -> tuple[str, str]:
    """The access token of a run's own server, and the secret that signs its attempts' keys. Agents have neither, so
    that none can read or change the data of another.

    With a `shared` store, runners of its server run attempts, too: keys are signed with that server's token.
    """
    token = secrets.token_urlsafe(24)
    if shared is None:
        return token, attempt_secret(token)
    shared_token = shared.token if isinstance(shared, LightningStoreClient) else os.environ.get("AGL_TOKEN")
    return token, attempt_secret(shared_token or None)


def make_runner(
    config: RunnerConfig,
    store: LightningStoreBase,
    agent: Any,
    reward: Any | None,
    secret: str,
    *,
    redirect: bool = True,
    queue: str | None = None,
    log: Path | None = None,
) -> Runner:
    return Runner(
        store,
        agent,
        secret=secret,
        reward=reward,
        redirect=redirect,
        queues=None if queue is None else [queue],
        concurrency=config.concurrency,
        hosts=config.hosts,
        fresh_process=config.fresh_process,
        env=config.env or None,
        hide=config.hide,
        cwd=config.cwd,
        log=log,
    )


def routes_models(config: TrainConfig) -> bool:
    """Whether the gateway serves models without a policy."""
    return bool(config.gateway.models or config.gateway.routes)


async def load_agent(
    runner: Runner | None,
    stack: AsyncExitStack,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    policy: bool,
    url: str | None = None,
) -> socket.socket:
    """Import the agent in its own process and, if there will be a `policy`, torch in this one at the same time. Returns
    the bound socket of the server, because an agent may make a client with its address when it is imported; `url` is
    that of another server, where that answers the agent's calls."""
    listener = listen(host, port)
    stack.callback(listener.close)
    if runner is None:
        return listener
    runner.server_url = url or url_of(host, listener.getsockname()[1])
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


def check_runners(config: TrainConfig, store: LightningStoreBase | None, agent: Any, reward: Any) -> None:
    """Raises ConfigError if no runner would run the rollouts, or none that can."""
    if config.runner.hosts:
        if agent is None:
            raise ConfigError(NO_AGENT)
        return
    if store is None:
        raise ConfigError(
            "n_runners=0 (runner.hosts) leaves the agent to runners elsewhere, which need a store that they can reach:"
            " Trainer(store=agl.LightningStoreClient(URL of agl serve))"
        )
    if agent is not None or reward is not None or config.runner.hooks:
        raise ConfigError(
            "n_runners=0 (runner.hosts) leaves the agent, its reward and its hooks to runners elsewhere; give them"
            " there: agl runner --server URL --agent ... --reward ..."
        )
    server = urlsplit(store.url).hostname if isinstance(store, LightningStoreClient) else None
    answers_here = config.run.public_url is None and not config.run.gateways
    if server and not is_loopback(server) and answers_here and is_loopback(config.run.host):
        raise ConfigError(
            f"run.host={config.run.host} cannot be reached by runners of {server}; set run.host=0.0.0.0, run.port and"
            " run.public_url=http://THIS_MACHINE:PORT, or leave the calls to that server (run.gateways)"
        )


def queue_of(config: RunnerConfig, store: LightningStoreBase | None, run_id: str) -> str | None:
    """The queue of a run's rollouts: a private one, if others claim from the same store."""
    if config.queue is not None or store is None or config.hosts == 0:
        return config.queue
    return f"{PRIVATE_QUEUE}run-{run_id}"


async def report_missing_runners(store: LightningStoreBase, run_id: str, report: Callable[[str], None]) -> None:
    """Report, once each time, that rollouts of a run wait while no runner works on them."""
    reported = False
    while True:
        await asyncio.sleep(IDLE_SECONDS)
        own: dict[str, Any] = {"rollout_id_contains": run_id, "limit": 1}
        waiting = await store.query_rollouts(status_in=["queuing", "requeuing"], **own)
        idle = bool(waiting) and not await store.query_rollouts(status_in=["preparing", "running"], **own)
        if idle and not reported:
            server = store.url if isinstance(store, LightningStoreClient) else "URL"
            queue, mode = waiting[0].queue, waiting[0].mode
            named = "" if queue == mode else f" --queue {queue}"  # else it would take none of the other modes
            report(
                f"rollouts of this run wait in the queue {queue!r} and no runner works on them; start one:"
                f" agl runner --server {server}{named} --agent ..."
            )
        reported = idle


async def run_beside(runner: Runner | None, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises the runner's error if the runner ends first."""
    if runner is None:
        return await work
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
