"""A trainer that updates without a pause, with its gateway in this process or in one it has joined; see joined.py.

It answers lines of JSON: `{"job": "updates"}` begins updates, `{"job": "rest"}` ends them after the one under way and
says how many there were and how long calls were held back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


from agentlightning.config import RunConfig, TrainConfig
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.models.tiny import make_tiny
from agentlightning.policy.config import LocalPolicyConfig, PolicyConfig
from agentlightning.policy.learner import Learner
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.served import ServedPolicy
from agentlightning.server.serve import serve
from agentlightning.store import LightningStore
from agentlightning.training.joined_gateways import JoinedGateways
from agentlightning.trajectory import Node, TokenTree, TrainingSample
from agentlightning.util.event_loop import run_sync

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support.model_server import ScriptedModelServer

ANSWERS, PROMPT, ANSWER = 64, 64, 64
"""What an update learns from: answers, and tokens of each."""


def samples(seed: int) -> list[TrainingSample]:
    draw = random.Random(seed)
    made = []
    for _ in range(ANSWERS):
        prompt, drawn = (tuple(draw.choices(range(3, 200), k=length)) for length in (PROMPT, ANSWER))
        tree = TokenTree((Node(-1, prompt), Node(0, drawn, True, (-5.5,) * ANSWER, "ro", "call")))
        share = (1 / ANSWERS / ANSWER,) * ANSWER
        made.append(TrainingSample(tree, advantages=((), (1.0,) * ANSWER), weights=((), share)))
    return made


class Updates:
    """Updates one after another while it runs, and the time that calls were held back for them."""

    def __init__(self, policy: ServedPolicy, updating: Any) -> None:
        self._updating = updating
        self.learner = Learner(policy, self._held, token_budget=4096)
        self.count, self.held = 0, 0.0
        self._running = False
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[bool]:
        began = time.perf_counter()
        async with self._updating() as going_on:
            yield going_on
        self.held += time.perf_counter() - began

    async def _run(self) -> None:
        while self._running:
            await self.learner.update(await asyncio.to_thread(samples, self.count))
            self.count += 1

    async def updates(self) -> dict[str, Any]:
        self._running = True
        self._task = asyncio.create_task(self._run())
        return {}

    async def rest(self) -> dict[str, Any]:
        self._running = False
        if self._task is not None:
            await self._task
            self._task = None
        count, held, self.count, self.held = self.count, self.held, 0, 0.0
        return {"updates": count, "held": held}


async def answer_jobs(updates: Updates, url: str) -> None:
    print(json.dumps({"url": url}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)["job"]
        print(json.dumps(await {"updates": updates.updates, "rest": updates.rest}[job]()), flush=True)


async def train(options: argparse.Namespace) -> None:
    """The trainer, with the model server at `--server`; it joins the server at `--hub`, if there is one."""
    folder = options.folder
    shape: dict[str, Any] = {"hidden_size": options.hidden, "layers": options.layers}
    model = await asyncio.to_thread(make_tiny, folder / "model", (), **shape)
    config = LocalPolicyConfig(model=str(model), name="policy", device="cpu", threads=1)
    async with AsyncExitStack() as stack:
        learner = await asyncio.to_thread(LocalPolicy.open, config)
        # The scripted server's answers are not the model's, so that only the tolerance lets updates go on.
        servers = ServersConfig(urls=(options.server,), tolerance=1e9)
        policy = await ServedPolicy.open(learner, servers, folder, dtype="float32")
        stack.push_async_callback(policy.close)
        how: dict[str, Any] = {"in_flight": options.in_flight, "drain_seconds": None}
        if options.hub:
            settings = TrainConfig(
                run=RunConfig(gateways=(options.hub,), gateway_lease_seconds=60.0), policy=PolicyConfig(**how)
            )
            joined = JoinedGateways(settings, None, "run", print)
            stack.push_async_callback(joined.close)
            await stack.enter_async_context(joined.join(policy))
            return await answer_jobs(Updates(policy, joined.updating), options.hub)
        store = LightningStore(folder / "store.db")
        stack.push_async_callback(store.close)
        server = await stack.enter_async_context(serve(store, {"policy": policy}, secret="s"))
        assert server.gateway is not None
        gate = server.gateway.gates.of(policy)
        await answer_jobs(Updates(policy, partial(gate.update, **how)), server.url)


async def sample() -> None:
    """The model server, until its input ends."""
    async with ScriptedModelServer(context_length=2048) as server:
        print(json.dumps({"url": server.url}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--server", help="the model server; left out: be one")
    parser.add_argument("--hub")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--in-flight", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    run_sync(train(options) if options.server else sample())


if __name__ == "__main__":
    main()
