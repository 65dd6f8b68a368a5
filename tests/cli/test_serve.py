"""`agl serve`: what it refuses to start with, and how it starts, serves and ends."""

import asyncio
import signal
import socket
import sqlite3

import httpx
import pytest

from agentlightning.attempt_address import attempt_key, attempt_path, attempt_secret
from agentlightning.cli.serve import prune_regularly
from agentlightning.errors import ConfigError, ServerError, StoreFullError
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.span import Span
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.types import Retention

# -- what it refuses -------------------------------------------------------------------------------------------------


def refused(result) -> str:
    """The one line it ends with."""
    assert result.exit_code == 2, result.output
    [line] = [line for line in result.stderr.splitlines() if line]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_an_address_others_can_reach_needs_a_token(invoke, host):
    assert "--no-token" in refused(invoke("serve", "--host", host, "--store", ":memory:"))


def test_a_token_that_nobody_could_send_is_refused_and_not_shown(invoke):
    assert "b\nd" not in refused(invoke("serve", "--store", ":memory:", "--token", "b\nd"))


def test_a_path_that_cannot_be_written_is_named(invoke):
    assert "/proc/nowhere" in refused(invoke("serve", "--port", "0", "--store", "/proc/nowhere/store.db"))


def test_a_database_of_a_newer_version_is_refused_with_advice(invoke, tmp_path):
    asyncio.run(LightningStore(tmp_path / "s.db").close())
    with sqlite3.connect(tmp_path / "s.db") as database:
        database.execute("UPDATE about SET value = '99' WHERE name = 'schema_version'")
    database.close()
    assert "99" in refused(invoke("serve", "--port", "0", "--store", str(tmp_path / "s.db")))


def test_a_port_in_use_is_named(invoke):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(invoke("serve", "--port", str(port), "--store", ":memory:"))


def test_host_and_port_may_come_from_the_environment(invoke, monkeypatch):
    monkeypatch.setenv("AGL_SERVER_HOST", "0.0.0.0")
    assert "0.0.0.0" in refused(invoke("serve", "--store", ":memory:"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("AGL_SERVER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("AGL_SERVER_HOST", "127.0.0.1")
        assert str(taken.getsockname()[1]) in refused(invoke("serve", "--store", ":memory:"))


def test_an_origin_that_is_no_site_is_named(invoke):
    assert "'mine'" in refused(invoke("serve", "--port", "0", "--store", ":memory:", "--allow-origin", "mine"))


def test_a_model_that_is_no_directory_is_named(invoke):
    assert "/no/such/model" in refused(
        invoke("serve", "--port", "0", "--store", ":memory:", "--model", "/no/such/model")
    )


def test_a_size_that_is_none_is_refused(invoke):
    assert "much" in refused(invoke("serve", "--store", ":memory:", "--keep-size", "much"))
    assert "plenty" in refused(invoke("serve", "--store", ":memory:", "--max-body", "plenty"))


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("--grace-seconds", "3"), {"grace_seconds": 3}),
        (("--allow-unattributed",), {"allow_unattributed": True}),
        (("--max-body", "1KB"), {"max_body_bytes": 1000}),
        (("--token", "secret"), {"token": "secret", "require_key": True}),
        (("--token", ""), {"token": None, "require_key": False}),
        (("--adopt-traces",), {"adopt_traces": True}),
        (("--host", "localhost", "--port", "4711"), {"host": "localhost", "port": 4711}),
        (("--allow-host", "hub", "--allow-host", "hub.lan"), {"allowed_hosts": ["hub", "hub.lan"]}),
        (("--allow-origin", "https://site"), {"allowed_origins": ["https://site"]}),
    ],
)
def test_every_option_of_the_server_reaches_it(invoke, monkeypatch, words, given):
    reached = {}

    def serve(store, engines, **options):
        reached.update(options)
        raise ServerError("not today")

    monkeypatch.setattr("agentlightning.server.serve.serve", serve)
    assert refused(invoke("serve", "--store", ":memory:", *words)) == "error: not today"
    assert {name: reached[name] for name in given} == given


# -- its life --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_it_serves_store_metrics_and_gateway_and_ends_in_good_order(start, tmp_path):
    options = ("--port", "0", "--store", "s.db", "--max-body", "100KB", "--json")
    program = start("serve", *options, AGL_TOKEN="open-sesame")
    said = program.line()
    url = said["url"]
    assert (said["pid"], said["token"]) == (program.process.pid, True)
    client = LightningStoreClient(url, "open-sesame")
    queued = await client.enqueue_rollout({"x": 1})
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 401
        shown = await http.get("/metrics", headers={"authorization": "Bearer open-sesame"})
        assert 'agentlightning_rollouts{status="queuing"} 1.0' in shown.text
        assert (await http.get("/v1/agl/nowhere", headers={"authorization": "Bearer open-sesame"})).status_code == 404
        with pytest.raises(ConfigError, match="100000"):
            await client.enqueue_rollout("x" * 100_001)
        key = {"authorization": "Bearer open-sesame", "content-type": "application/json"}
        assert (await http.post("/v1/traces", content=b" " * 100_001, headers=key)).status_code == 413
        started = await client.start_rollout("a task")
        ids = started.rollout_id, started.attempt.attempt_id
        path, key = f"{attempt_path(*ids)}/v1/chat/completions", attempt_key(attempt_secret("open-sesame"), *ids)
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        assert (await http.post(path, json=body)).status_code == 401
        reply = await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        assert (reply.status_code, "agl serve --model" in reply.json()["error"]["message"]) == (404, True)

    waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=60))
    while "agentlightning_store_waiters" not in (text := await _metrics(url)) or _waiters(text) < 1:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert await asyncio.to_thread(program.stop) == 0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await client.close()
    store = LightningStore(tmp_path / "s.db")
    assert (await store.get_rollout_by_id(queued.rollout_id)).input == {"x": 1}
    await store.close()
    assert "open-sesame" not in "".join(program.errors)


async def _metrics(url):
    async with httpx.AsyncClient(headers={"authorization": "Bearer open-sesame"}) as http:
        return (await http.get(f"{url}/metrics")).text


def _waiters(text):
    lines = [line for line in text.splitlines() if line.startswith("agentlightning_store_waiters{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def _hang(url):
    """Begin a model call that never ends; returns what keeps it open."""
    client = LightningStoreClient(url)
    started = await client.start_rollout("a task")
    await client.close()
    path = f"{attempt_path(started.rollout_id, started.attempt.attempt_id)}/v1/chat/completions"
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{{".encode())
    await writer.drain()
    return writer


@pytest.mark.slow
async def test_a_second_signal_ends_it_at_once(start):
    program = start("serve", "--port", "0", "--store", ":memory:", "--json")
    writer = await _hang(program.line()["url"])
    program.process.send_signal(signal.SIGTERM)
    while not any("stopping" in line for line in program.errors):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(program.stop, signal.SIGINT, 3) == 130
    writer.close()


@pytest.mark.slow
async def test_what_is_not_answered_within_the_time_of_grace_is_cut_off(start):
    program = start("serve", "--port", "0", "--store", ":memory:", "--json", "--grace-seconds", "0")
    writer = await _hang(program.line()["url"])
    assert await asyncio.to_thread(program.stop, signal.SIGTERM, 8) == 0, "by default it has 10 seconds"
    writer.close()


@pytest.mark.slow
async def test_it_answers_model_calls_with_the_model_it_was_given(start, tmp_path):
    from openai import AsyncOpenAI

    from agentlightning.attempt_variables import attempt_environment
    from agentlightning.models.tiny import make_tiny

    await asyncio.to_thread(make_tiny, tmp_path / "small", [{"messages": [{"role": "user", "content": "hello"}]}])
    program = start("serve", "--port", "0", "--store", ":memory:", "--json", "--model", "pupil=small")
    url = program.line(60)["url"]
    client = LightningStoreClient(url)
    started = await client.start_rollout("a task")
    environment = attempt_environment(url, attempt_secret(None), started.rollout_id, started.attempt.attempt_id)
    async with AsyncOpenAI(base_url=environment["OPENAI_BASE_URL"], api_key=environment["AGL_KEY"]) as openai:
        messages = [{"role": "user", "content": "hello"}]
        answer = await openai.chat.completions.create(model="pupil", messages=messages, max_tokens=4)
    assert answer.model == "pupil"
    [span] = await client.query_spans(started.rollout_id)
    assert span.name == "chat pupil"
    await client.close()
    assert await asyncio.to_thread(program.stop) == 0


@pytest.mark.slow
async def test_a_model_is_served_to_programs_of_no_rollout_where_that_is_allowed(start, tmp_path):
    from openai import AsyncOpenAI, AuthenticationError

    from agentlightning.models.tiny import make_tiny

    await asyncio.to_thread(make_tiny, tmp_path / "small", [{"messages": [{"role": "user", "content": "hello"}]}])
    options = ("--port", "0", "--store", ":memory:", "--json", "--model", "small", "--allow-unattributed")
    program = start("serve", *options, AGL_TOKEN="open-sesame")
    url = program.line(60)["url"]
    call = {"model": "gpt-5", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="open-sesame", max_retries=0) as openai:
        assert (await openai.chat.completions.create(**call)).usage.completion_tokens
        with pytest.raises(AuthenticationError, match="requires"):
            await openai.with_options(api_key="another").chat.completions.create(**call)
    client = LightningStoreClient(url, "open-sesame")
    assert await client.count_rollouts() == 0, "nothing is recorded"
    await client.close()
    assert await asyncio.to_thread(program.stop) == 0


@pytest.mark.slow
async def test_spans_are_sent_on_and_traces_of_nobody_adopted(start):
    second = start("serve", "--port", "0", "--store", ":memory:", "--json", "--adopt-traces").line()["url"]
    first = start("serve", "--port", "0", "--store", ":memory:", "--json", "--otlp-export", second)
    here, there = LightningStoreClient(first.line()["url"]), LightningStoreClient(second)
    started = await here.start_rollout("a task")
    await here.add_span(Span(started.rollout_id, started.attempt.attempt_id, "work", 1.0, 2.0))
    assert await asyncio.to_thread(first.stop) == 0, "what waited was to be sent before the end"
    span = {
        "traceId": "a" * 32,
        "spanId": "b" * 16,
        "name": "elsewhere",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
    }
    async with httpx.AsyncClient(base_url=second) as http:
        await http.post("/v1/traces", json={"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
        shown = (await http.get("/metrics")).text
    assert "agentlightning_otlp_requests_total 2.0" in shown
    [adopted] = await there.query_rollouts()
    assert [span.name for span in await there.query_spans(adopted.rollout_id)] == ["elsewhere"]
    await here.close()
    await there.close()


# -- retention -------------------------------------------------------------------------------------------------------


async def test_what_need_not_be_kept_is_forgotten_again_and_again(caplog):
    store, done = InMemoryLightningStore(), asyncio.Event()

    class Busy:
        """A store that is full the first time."""

        rounds = 0

        async def prune(self, retention):
            self.rounds += 1
            if self.rounds == 1:
                raise StoreFullError("no space")
            pruned = await store.prune(retention)
            if self.rounds == 3:
                done.set()
            return pruned

    ids = [r.rollout_id for r in await store.enqueue_many_rollouts([EnqueueRolloutRequest(i) for i in range(5)])]
    for rollout_id in ids:
        await store.cancel_rollout(rollout_id)
    with caplog.at_level("INFO", logger="agentlightning.cli.serve"):
        work = asyncio.create_task(prune_regularly(Busy(), Retention(max_rollouts=2), every_seconds=0.01))  # type: ignore[arg-type]
        await asyncio.wait_for(done.wait(), 20)
        work.cancel()
    assert [r.rollout_id for r in await store.query_rollouts()] == ids[3:]
    assert "pruned 3 rollouts" in caplog.text
    assert "could not prune" in caplog.text
    await store.close()


@pytest.mark.slow
def test_models_of_tinker_are_served_to_those_with_the_token_and_weights_go_where_it_says(start, tmp_path):
    from tests.support.models import tiny_checkpoint

    tiny_checkpoint(tmp_path / "model")
    arguments = ("--port", "0", "--store", "s.db", "--tinker", "small=model", "--tinker-weights", "kept", "--json")
    program = start("serve", *arguments, AGL_TOKEN="secret")
    url = program.line(90)["url"] + "/api/v1"
    assert httpx.get(f"{url}/get_server_capabilities").status_code == 401
    with httpx.Client(base_url=url, headers={"x-api-key": "tml-secret"}) as client:
        served = client.get("/get_server_capabilities").json()["supported_models"]
        assert [each["model_name"] for each in served] == ["small"]
        session = client.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "small", "lora_config": {"rank": 2}}
        created = client.post("/create_model", json=body).json()["request_id"]
        model = client.post("/retrieve_future", json={"request_id": created}).json()["model_id"]
        saved = client.post("/save_weights", json={"model_id": model, "seq_id": 1, "path": "one"}).json()["request_id"]
        assert client.post("/retrieve_future", json={"request_id": saved}).json()["path"].endswith("/weights/one")
    assert list((tmp_path / "kept").rglob("adapter_model.safetensors"))
    assert program.stop() == 0


def test_a_tinker_model_that_is_no_directory_is_named(invoke):
    assert "nowhere" in refused(invoke("serve", "--port", "0", "--store", ":memory:", "--tinker", "x=./nowhere"))
