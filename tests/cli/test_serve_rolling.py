"""A rolling update: `agl serve` processes are replaced one after another under calls, and no call is lost."""

import asyncio
import signal

import httpx
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.waiting import until

from agentlightning.attempt_address import attempt_secret
from agentlightning.attempt_variables import attempt_environment
from agentlightning.store.http.client import LightningStoreClient

REQUEST = {"model": "them", "messages": [{"role": "user", "content": "hi"}]}

PROBE_SECONDS = 0.2
CALL_SECONDS = 0.3
DRAIN_SECONDS = 1.5
ROUTES = """
[[routes]]
model = "them"
provider = "them"

[[providers]]
name = "them"
base_urls = ["{}"]
api_key_env = "THEIR_KEY"
"""


def slow_provider():
    """A provider whose answers take longer than a probe."""
    return ScriptedProvider(lambda seen: Reply(chat_answer("Hello."), seconds=CALL_SECONDS))


async def caller_of(url):
    """A client for the model calls of an attempt: it keeps its connections and retries nothing."""
    store = LightningStoreClient(url)
    try:
        started = await store.start_rollout("a task")
    finally:
        await store.close()
    variables = attempt_environment(url, attempt_secret(None), started.rollout_id, started.attempt.attempt_id)
    key = {"authorization": f"Bearer {variables['AGL_KEY']}"}
    return httpx.AsyncClient(base_url=variables["OPENAI_BASE_URL"], headers=key, timeout=30)


class Balancer:
    """Sends calls to servers in turn that `/readyz` has called ready at the last probe, as a Service does."""

    def __init__(self):
        self.urls, self.ready = set(), []
        self.answered, self.lost = 0, []
        self._clients = {}

    async def add(self, url):
        self._clients[url] = await caller_of(url)
        self.urls.add(url)

    async def probe(self):
        while True:
            self.ready = [url for url in sorted(self.urls) if await self._is_ready(url)]
            await asyncio.sleep(PROBE_SECONDS)

    async def _is_ready(self, url):
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{url}/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    async def call_on_and_on(self, number):
        for turn in range(10_000):
            url = self.ready[(number + turn) % len(self.ready)]
            try:
                response = await self._clients[url].post("/chat/completions", json=REQUEST)
                assert response.status_code == 200, response.text
                self.answered += 1
            except (httpx.TransportError, AssertionError) as error:
                self.lost.append(error)

    async def close(self):
        for client in self._clients.values():
            await client.aclose()

    async def until(self, *urls):
        async with asyncio.timeout(30):
            while set(self.ready) != set(urls):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_servers_are_replaced_under_calls_and_none_is_lost(start, tmp_path):
    async with slow_provider() as provider:
        (tmp_path / "routes.toml").write_text(ROUTES.format(f"{provider.url}/v1"))

        def serve(name):
            arguments = ("--port", "0", "--store", f"{name}.db", "--routes", "routes.toml", "--json")
            return start("serve", *arguments, "--drain-seconds", str(DRAIN_SECONDS), THEIR_KEY="sk-1")

        old = [serve("a"), serve("b")]
        balancer = Balancer()
        urls = [program.line()["url"] for program in old]
        for url in urls:
            await balancer.add(url)
        probing = asyncio.create_task(balancer.probe())
        await balancer.until(*urls)
        callers = [asyncio.create_task(balancer.call_on_and_on(number)) for number in range(8)]
        for program, name, url in zip(old, "cd", list(urls), strict=True):
            new = serve(name)
            urls.append((await asyncio.to_thread(new.line))["url"])
            await balancer.add(urls[-1])
            await balancer.until(*urls)
            before = balancer.answered
            status = asyncio.create_task(asyncio.to_thread(program.stop, signal.SIGTERM))
            urls.remove(url)
            await balancer.until(*urls)
            assert await status == 0
            assert balancer.answered > before
        for task in (probing, *callers):
            task.cancel()
        await asyncio.gather(probing, *callers, return_exceptions=True)
        await balancer.close()
        assert balancer.lost == []
        assert balancer.answered > 40


@pytest.mark.slow
async def test_a_call_in_progress_finishes_within_the_grace_and_is_cut_off_after_it(start, tmp_path):
    async with slow_provider() as provider:
        (tmp_path / "routes.toml").write_text(ROUTES.format(f"{provider.url}/v1"))
        for grace, finishes in (("5", True), ("0", False)):
            arguments = ("--port", "0", "--store", f"{grace}.db", "--routes", "routes.toml", "--json")
            program = start("serve", *arguments, "--grace-seconds", grace, THEIR_KEY="sk-1")
            async with await caller_of((await asyncio.to_thread(program.line))["url"]) as client:
                call = asyncio.create_task(client.post("/chat/completions", json=REQUEST))
                await until(lambda: provider.seen)
                provider.seen.clear()
                assert await asyncio.to_thread(program.stop, signal.SIGTERM) == 0
                [outcome] = await asyncio.gather(call, return_exceptions=True)
            assert (isinstance(outcome, httpx.Response) and outcome.status_code == 200) == finishes, outcome
