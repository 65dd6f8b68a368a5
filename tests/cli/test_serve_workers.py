"""`agl serve --workers N`: several processes behind one port, any of which answers any call of any attempt."""

import asyncio
import os
import re
import signal
import socket
from collections import Counter
from itertools import count

import httpx
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.attempt_address import attempt_path
from agentlightning.cli.run import descendants
from agentlightning.store import LightningStore
from agentlightning.store.http.client import LightningStoreClient

TRACE = "0123456789abcdef0123456789abcdef"
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES = """
[[routes]]
model = "them"
provider = "them"

[[providers]]
name = "them"
base_urls = ["{}"]
"""


def a_provider(seconds=0.0):
    """Each of its answers has an id of its own."""
    ids = count()
    return ScriptedProvider(lambda seen: Reply(chat_answer("Hello.", id=f"c-{next(ids)}"), seconds=seconds))


@pytest.fixture
def serve(start, tmp_path):
    """Start two processes behind one port, which pass calls on to a provider; (program, its first line)."""

    async def serve(provider, *more):
        (tmp_path / "routes.toml").write_text(ROUTES.format(f"{provider.url}/v1"))
        options = ("--workers", "2", "--port", "0", "--store", "s.db", "--routes", "routes.toml", "--json")
        program = start("serve", *options, *more)
        return program, await asyncio.to_thread(program.line, 60)

    return serve


async def new_attempt(url):
    client = LightningStoreClient(url)
    started = await client.start_rollout("a task")
    await client.close()
    return started.rollout_id, started.attempt.attempt_id


async def once(method, url, **options):
    """A request over a connection of its own."""
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.request(method, url, **options)


async def by_process(url, name):
    """The values of a metric, by the number of the process."""
    text = (await once("GET", f"{url}/metrics")).text
    return {number: float(value) for number, value in re.findall(rf'^{name}{{process="(\d+)"}} (\S+)$', text, re.M)}


async def until_both_answer(url, request):
    """Make requests, each over a connection of its own, until each process has answered one; all must succeed."""
    metric = "agentlightning_gateway_requests_total"
    before = await by_process(url, metric)
    for _ in range(100):
        response = await request()
        assert response.status_code == 200, response.text
        now = await by_process(url, metric)
        if now.keys() == before.keys() == {"1", "2"} and all(now[each] > before[each] for each in now):
            return
    raise AssertionError(f"one process has answered all of 100 requests: {before} -> {now}")


async def recorded_ids(path, rollout_id):
    """How often each answer is in the store."""
    store = LightningStore(path)
    spans = await store.query_spans(rollout_id)
    await store.close()
    return Counter(span.attributes[names.RESPONSE_ID] for span in spans if names.RESPONSE_ID in span.attributes)


# -- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--store", ":memory:"], "a store in memory"),
        (["--model", "tiny"], "--model"),
        (["--tinker", "tiny"], "--tinker"),
    ],
)
def test_what_one_process_has_to_hold_is_refused_by_name(invoke, tmp_path, options, named):
    given = [] if "--store" in options else ["--store", str(tmp_path / "s.db")]
    result = invoke("serve", "--workers", "2", "--port", "0", *given, *options)
    assert result.exit_code == 2
    assert f"--workers 2 cannot share {named}, which one process has to hold" in result.stderr


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("max_concurrency = 1", "max_concurrency=1 of the provider 'them' cannot be divided between 2 processes"),
        ("[budget]\ndollars = 5.0", "cannot share a budget"),
        ('[models]\nfrozen = "tiny"', "cannot share models of the routes file"),
    ],
)
def test_routes_that_cannot_be_shared_are_refused_by_name(invoke, tmp_path, more, named):
    (tmp_path / "routes.toml").write_text(ROUTES.format("http://127.0.0.1:9/v1") + more)
    options = ("--store", str(tmp_path / "s.db"), "--routes", str(tmp_path / "routes.toml"))
    result = invoke("serve", "--workers", "2", "--port", "0", *options)
    assert (result.exit_code, named in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_workers_that_is_none_is_refused(invoke, number):
    result = invoke("serve", "--workers", number)
    assert (result.exit_code, "--workers" in result.stderr) == (2, True)


def test_a_port_in_use_is_named(invoke, tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another server with workers
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = invoke("serve", "--workers", "2", "--port", str(port), "--store", str(tmp_path / "s.db"))
    assert (result.exit_code, f"cannot listen on 127.0.0.1:{port}" in result.stderr) == (2, True)


@pytest.mark.slow
def test_what_fails_at_the_start_is_said_once_and_ends_all(start):
    program = start("serve", "--workers", "3", "--port", "0", "--store", "/proc/nowhere/store.db", "--json")
    assert program.line(60)["error"]["type"] == "ConfigError"
    assert program.process.wait(30) == 2
    assert sum("/proc/nowhere" in line for line in program.errors) == 1


# -- its life --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_calls_of_an_attempt_reach_every_process_and_are_recorded_once(serve, tmp_path):
    async with a_provider() as provider:
        program, said = await serve(provider)
        url = said["url"]
        assert (said["pid"], said["workers"]) == (program.process.pid, 2)
        ids = await new_attempt(url)
        base, answered = f"{url}{attempt_path(*ids)}/v1", []

        async def call(number):
            async with httpx.AsyncClient(timeout=60) as client:
                for _ in range(3):
                    response = await client.post(
                        f"{base}/chat/completions", json={"model": "them", "messages": MESSAGES}
                    )
                    assert response.status_code == 200, response.text
                    answered.append(response.json()["id"])

        await asyncio.gather(*map(call, range(16)))
        requests = await by_process(url, "agentlightning_gateway_requests_total")
        assert (len(requests), min(requests.values()) > 0, sum(requests.values())) == (2, True, 48)
        assert len(set(answered)) == 48

        # A reply is continued, and retrieved, by a process that has not made it.
        first = (await once("POST", f"{base}/responses", json={"model": "them", "input": "one"})).json()["id"]
        more = {"model": "them", "input": "two", "previous_response_id": first}
        await until_both_answer(url, lambda: once("POST", f"{base}/responses", json=more))
        continued = provider.seen[-1].json["messages"]
        assert [message["content"] for message in continued] == ["one", "Hello.", "two"]
        found = await asyncio.gather(*(once("GET", f"{base}/responses/{first}") for _ in range(12)))
        assert {response.status_code for response in found} == {200}

        # The attempt that one process has seen in a trace is that of the trace in the other.
        within = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        body = {"model": "them", "messages": MESSAGES}
        assert (await once("POST", f"{base}/chat/completions", json=body, headers=within)).status_code == 200
        await until_both_answer(url, lambda: once("POST", f"{url}/v1/chat/completions", json=body, headers=within))

        joining = {"run_id": "r", "urls": ["http://127.0.0.1:9"], "changes_weights": True}
        refused = await once("POST", f"{url}/v1/policies/policy/check", json=joining)
        assert (refused.status_code, "agl serve --workers" in refused.text) == (422, True)

        assert await asyncio.to_thread(program.stop) == 0
    recorded = await recorded_ids(tmp_path / "s.db", ids[0])
    assert {each: recorded[each] for each in answered} == dict.fromkeys(answered, 1)


@pytest.mark.slow
async def test_sigterm_ends_all_processes_once_their_calls_are_answered(serve, tmp_path):
    async with a_provider(1.0) as provider:
        program, said = await serve(provider)
        ids = await new_attempt(said["url"])
        path = f"{said['url']}{attempt_path(*ids)}/v1/chat/completions"
        call = {"model": "them", "messages": MESSAGES}
        calls = [asyncio.create_task(once("POST", path, json=call)) for _ in range(12)]
        await until(lambda: len(provider.seen) == 12)
        assert await asyncio.to_thread(program.stop) == 0
        answered = [response.json()["id"] for response in await asyncio.gather(*calls)]
        with pytest.raises(httpx.ConnectError):
            await once("GET", f"{said['url']}/livez")
    assert await recorded_ids(tmp_path / "s.db", ids[0]) == Counter(answered)
    assert len(set(answered)) == 12


@pytest.mark.slow
async def test_a_killed_process_loses_nothing_and_is_replaced(serve, tmp_path):
    async with a_provider(0.05) as provider:
        program, said = await serve(provider)
        url, answered, broken = said["url"], [], []
        ids = await new_attempt(url)
        path, done = f"{url}{attempt_path(*ids)}/v1/chat/completions", asyncio.Event()

        async def call():
            while not done.is_set():
                try:
                    async with httpx.AsyncClient(timeout=60) as client:
                        while not done.is_set():
                            response = await client.post(path, json={"model": "them", "messages": MESSAGES})
                            assert response.status_code == 200, response.text
                            answered.append(response.json()["id"])
                except httpx.TransportError as error:  # as SDKs do, the call is repeated
                    broken.append(error)

        callers = [asyncio.create_task(call()) for _ in range(12)]
        await until(lambda: len(answered) > 24)
        children = descendants(program.process.pid)
        os.kill(children[0], signal.SIGKILL)
        killed_at = len(answered)
        while sum((await by_process(url, "agentlightning_process_restarts_total")).values()) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert len(descendants(program.process.pid)) == 2
        await until(lambda: len(answered) > killed_at + 24)
        assert 0 < len(broken) < 12  # those whose connections it had
        [line] = [line for line in program.errors if f"(pid {children[0]}) was killed by SIGKILL" in line]
        assert "it is started again, time 1" in line

        done.set()
        await asyncio.gather(*callers)
        assert await asyncio.to_thread(program.stop) == 0
    recorded = await recorded_ids(tmp_path / "s.db", ids[0])
    assert {each: recorded[each] for each in answered} == dict.fromkeys(answered, 1)


@pytest.mark.slow
async def test_processes_whose_parent_was_killed_end_too(serve):
    async with a_provider() as provider:
        program, said = await serve(provider)
        assert await asyncio.to_thread(program.stop, signal.SIGKILL) == -signal.SIGKILL
        async with asyncio.timeout(30):
            while True:
                try:
                    await once("GET", f"{said['url']}/livez")
                except httpx.TransportError:
                    break
                await asyncio.sleep(0.1)
