"""The arm of Agent Lightning 1.0.2; runs in its own environment (benchmarks/peers.sh). See line.py for the protocol.

It has no store in process and no spans; what comes closest to a cycle: enqueue, set running, 8 events of the same
attributes, set succeeded, read the events. A rollout is claimed by listing the queued ones, so the claim of a cycle is
left out here (to its favour).
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
import uuid
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from agentlightning.client import AgentLightningAsyncClient
from line import ATTRIBUTES, SPANS, drive, free_port, serve, serving

AGENT = """
import os, urllib.request

class Agent:
    def run(self):
        body = b'{"event_type": "reward", "data": {"value": 1.0}}'
        headers = {"content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(os.environ["AGL_EVENT_URL"], body, headers)).close()
"""
_numbers = count()


@asynccontextmanager
async def client() -> Any:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}"]
    with tempfile.TemporaryDirectory() as folder, serving(command, f"{url}/healthz", cwd=folder):
        async with AgentLightningAsyncClient(base_url=url) as api:
            yield api


async def cycle(api: Any) -> int:
    rollout_id = uuid.uuid4().hex
    address = f"/api/rollouts/{rollout_id}"
    await sent(api.post("/api/rollouts", json=[{"input": {"question": "What is 6 x 7?"}, "rollout_id": rollout_id}]))
    await sent(api.patch(address, json={"status": {"state": "running", "last_attempt_id": "0"}}))
    for _ in range(SPANS):
        await add_event(api, rollout_id)
    await sent(api.patch(address, json={"status": {"state": "succeeded"}}))
    assert len((await sent(api.get(f"{address}/events"))).json()) == SPANS
    return 1


async def add_event(api: Any, rollout_id: str) -> int:
    attributes = ATTRIBUTES[next(_numbers) % len(ATTRIBUTES)]
    body = {"event_type": "chat", "data": {"name": "chat policy", "start": 1e9, "end": 1e9 + 1, **attributes}}
    await sent(api.post(f"/api/rollouts/{rollout_id}/attempt/0/events", json=body))
    return 1


async def sent(request: Any) -> Any:
    answer = await request
    answer.raise_for_status()
    return answer


async def http_cycles(callers: int, seconds: float) -> dict[str, float]:
    async with client() as api:
        return await drive(lambda _: cycle(api), callers, seconds)


async def http_spans(callers: int, seconds: float) -> dict[str, float]:
    async with client() as api:
        rollout_id = uuid.uuid4().hex
        await sent(api.post("/api/rollouts", json=[{"input": "task", "rollout_id": rollout_id}]))
        return await drive(lambda _: add_event(api, rollout_id), callers, seconds)


async def rollouts(number: int, pool: int, poll_seconds: float) -> dict[str, float]:
    """Trivial agents end to end by its local controller: a fresh process for each rollout, the only way it has."""
    async with client() as api:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "trivial.py").write_text(AGENT)
            settings = ["runner_type=local", f"agl_server.url={api.base_url}"]
            settings += [f"local_runner.maximum_size={pool}", f"local_runner.poll_interval={poll_seconds}"]
            environment = os.environ | {"PYTHONPATH": folder}
            quiet = asyncio.subprocess.DEVNULL
            controller = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agentlightning.controller", *settings),
                cwd=folder,
                env=environment,
                stdout=quiet,
                stderr=quiet,
            )
            try:
                await finish(api, pool)  # the controller is up and has done some
                started = time.perf_counter()
                await finish(api, number)
                return {"rollouts_per_second": number / (time.perf_counter() - started)}
            finally:
                controller.terminate()
                await controller.wait()


async def finish(api: Any, number: int) -> None:
    already = await terminal(api)
    body = [{"input": {}, "config": {"local": {"agent_class": "trivial:Agent"}}} for _ in range(number)]
    made = (await sent(api.post("/api/rollouts", json=body))).json()
    while await terminal(api) < already + number:  # noqa: ASYNC110 (another process is waited for)
        await asyncio.sleep(0.05)
    for each in made:
        detail = (await sent(api.get(f"/api/rollouts/{each['rollout_id']}"))).json()
        assert detail["rollout"]["status"]["state"] == "succeeded", detail


async def terminal(api: Any) -> int:
    return (await sent(api.get("/api/rollouts/terminal", params={"limit": 1}))).json()["total_terminal"]


if __name__ == "__main__":
    serve([http_cycles, http_spans, rollouts])
