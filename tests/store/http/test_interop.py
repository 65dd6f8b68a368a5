"""The published client of Agent Lightning 0.3, unchanged, against our server."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore

ROOT = Path(__file__).parents[3]
PEER = Path(os.environ.get("AGL_PEER_03") or ROOT / ".peers/agl03/bin/python")


@pytest.mark.slow
@pytest.mark.skipif(
    not PEER.exists(),
    reason=f"no agentlightning 0.3 at {PEER}; make it with benchmarks/peers.sh, or name its Python with AGL_PEER_03",
)
async def test_a_client_of_0_3_works_on_our_server() -> None:
    store = InMemoryLightningStore()
    async with Server(store, secret="s") as server:
        script = Path(__file__).with_name("interop_03.py")
        process = await asyncio.create_subprocess_exec(
            PEER, script, server.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd="/"
        )
        printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()[-3000:]
    seen = json.loads(printed.splitlines()[-1])
    worker = seen.pop("worker")
    assert (worker["status"], worker["heartbeat_stats"]) == ("busy", {"cpu": 0.5})
    assert worker["last_heartbeat_time"] is not None
    assert seen == {
        "resources": [True, "Say {x}"],
        "versions": [1, 1],
        "enqueued": ["queuing", "train", 3, 2],
        "claimed": [True, {"question": "6 x 7"}, "w1", "idle"],
        "nobody": None,
        "workers": 1,
        "spans": [1, [1, 2, 3], 3],
        "span": ["work", {"step": 1, "tags": ["a", "b"]}, "OK", True],
        "named": ["other"],
        "heartbeat": [123.0, "running"],
        "waiting": 0,
        "ended": ["succeeded", "succeeded", True],
        "rest": [0, 1, 2],
        "retried": "requeuing",
        "again": 2,
        "attempts": [["failed", "preparing"], 2],
        "latest": 2,
        "changed": ["cancelled", {"a": 1}],
        "started": ["preparing", 1],
        "found": [True],
        "page": [2, 2, 1, 5],
        "newest": True,
        "unknown": None,
        "statistics": 5,
    }
    await store.close()
