"""A real Phoenix shows what is exported to it: model calls with their messages, and rewards, a trace an attempt."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentlightning.attempt_address import attempt_key, attempt_path, trace_id_of
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.instrumented import instrument
from agentlightning.testing import ScriptedEngine
from agentlightning.tracing.otlp.exporter import OtlpExporter

ROOT = Path(__file__).resolve().parents[3]
PHOENIX = Path(os.environ.get("AGL_PHOENIX", ROOT / ".peers" / "phoenix")) / "bin" / "phoenix"
PATIENCE_SECONDS = 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PHOENIX.exists(), reason="no Phoenix: run tests/tracing/otlp/setup.sh, or set AGL_PHOENIX"),
]


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


@pytest.fixture
def phoenix(tmp_path: Path) -> Iterator[str]:
    """The address of a Phoenix that keeps its data in `tmp_path`."""
    settings = {
        "PHOENIX_WORKING_DIR": str(tmp_path),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(free_port()),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    url = f"http://127.0.0.1:{settings['PHOENIX_PORT']}"
    with (tmp_path / "phoenix.log").open("wb") as log:
        process = subprocess.Popen([PHOENIX, "serve"], env={**os.environ, **settings}, stdout=log, stderr=log)
    try:
        wait_for(lambda: httpx.get(f"{url}/healthz").is_success, process)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def wait_for(is_done: Any, process: subprocess.Popen[bytes] | None = None) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if is_done():
                return
        except httpx.TransportError:
            assert process is None or process.poll() is None, "Phoenix ended"
        assert time.monotonic() < until
        time.sleep(0.5)


async def test_phoenix_shows_the_calls_and_the_reward_of_an_attempt(phoenix: str) -> None:
    exporter = OtlpExporter(phoenix, delay_seconds=0.05)
    store = instrument(InMemoryLightningStore(), [exporter])
    gateway = Gateway(store, {"policy": ScriptedEngine(lambda _: "It is 42.")}, secret="s", default_model="policy")
    async with Server(store, gateway, secret="s") as server, httpx.AsyncClient(base_url=server.url) as agent:
        started = await store.start_rollout({"question": "What is 6 times 7?"})
        ids = started.rollout_id, started.attempt.attempt_id
        agent.headers["authorization"] = f"Bearer {attempt_key('s', *ids)}"
        asked = {"model": "policy", "messages": [{"role": "user", "content": "What is 6 times 7?"}]}
        (await agent.post("/v1/chat/completions", json=asked)).raise_for_status()
        event = {"event_type": "reward", "data": {"value": 1.0}}
        (await agent.post(f"{attempt_path(*ids)}/events", json=event)).raise_for_status()
    assert exporter.close()
    await store.close()
    assert (exporter.counts.sent, exporter.counts.dropped, exporter.counts.refused) == (2, 0, 0)

    def shown() -> dict[str, dict[str, Any]]:
        answer = httpx.get(f"{phoenix}/v1/projects/default/spans")
        found = answer.json()["data"] if answer.is_success else []
        return {span["name"]: span for span in found}

    wait_for(lambda: len(shown()) == 2)
    call, reward = shown()["chat policy"], shown()["gen_ai.evaluation.result"]
    assert call["span_kind"] == "LLM"
    assert call["attributes"]["llm.input_messages.0.message.content"] == "What is 6 times 7?"
    assert call["attributes"]["llm.output_messages.0.message.content"] == "It is 42."
    assert call["attributes"]["llm.token_count.completion"] > 0
    assert reward["attributes"]["gen_ai.evaluation.score.value"] == 1.0
    assert call["context"]["trace_id"] == reward["context"]["trace_id"] == trace_id_of(ids[1])
