"""A gateway that is killed under load: every call that was answered is in the store, and none of them twice."""

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter

import httpx
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import chat_events

from agentlightning import LightningStore, LightningStoreClient
from agentlightning import span as names
from agentlightning.attempt_address import attempt_path

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

ROUTES = """
[[providers]]
name = "them"
base_urls = ["{url}/v1"]
[[routes]]
model = "*"
provider = "them"
"""


def serve(folder, routes):
    command = [sys.executable, "-c", "from agentlightning.cli import main; main()", "serve", "--port", "0", "--json"]
    command += ["--store", str(folder / "store.db"), "--routes", str(routes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def end(process, how):
    process.send_signal(how)
    process.wait(30)
    process.stdout.close()


class Answers:
    """Each call gets an answer with a number of its own, whole or as a stream."""

    def __init__(self):
        self.number = 0

    def __call__(self, seen):
        self.number += 1
        name = f"chatcmpl-{self.number}"
        if not seen.json.get("stream"):
            return Reply(chat_answer("Hello.") | {"id": name})
        return Reply(events=[event.replace(b"chatcmpl-1", name.encode()) for event in chat_events(["Hello."])])


async def call_on(client, url, stream, heard, enough):
    """Call until the server is gone; what was answered to its last byte counts as heard. `enough` is (how many, an
    event for it)."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    while True:
        try:
            answer = await client.post(url, json=body)
        except httpx.TransportError:
            return
        assert answer.status_code == 200, answer.text
        text = answer.text
        start = text.index('"chatcmpl-') + 1
        heard.append(text[start : text.index('"', start)])
        if len(heard) >= enough[0]:
            enough[1].set()


async def test_every_call_that_was_answered_outlives_the_gateway(tmp_path):
    heard: list[str] = []
    async with ScriptedProvider(Answers()) as provider:
        routes = tmp_path / "routes.toml"
        routes.write_text(ROUTES.format(url=provider.url))
        for _ in range(4):
            process, server = await asyncio.to_thread(serve, tmp_path, routes)
            store = LightningStoreClient(server)
            rollout = await store.start_rollout({})
            await store.close()
            url = f"{server}{attempt_path(rollout.rollout_id, rollout.attempt.attempt_id)}/v1/chat/completions"
            enough = len(heard) + 150, asyncio.Event()
            async with httpx.AsyncClient(timeout=30) as client:
                calls = [asyncio.create_task(call_on(client, url, n % 2 == 1, heard, enough)) for n in range(16)]
                async with asyncio.timeout(60):
                    await enough[1].wait()
                    end(process, signal.SIGKILL)
                    await asyncio.gather(*calls)
        process, _ = await asyncio.to_thread(serve, tmp_path, routes)
        await asyncio.to_thread(end, process, signal.SIGTERM)

    assert len(heard) >= 600
    store = LightningStore(str(tmp_path / "store.db"))
    kept: Counter[str] = Counter()
    for rollout in await store.query_rollouts():
        spans = await store.query_spans(rollout.rollout_id)
        kept.update(span.attributes[names.RESPONSE_ID] for span in spans if span.status_code == "OK")
    await store.close()
    assert set(heard) <= set(kept)
    assert set(kept.values()) == {1}
