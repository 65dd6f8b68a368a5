"""LightningStoreClient: what it promises beyond the contract, which tests/conformance runs over it."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.store_hub import StoreHub

from agentlightning import LightningStoreClient
from agentlightning.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreAuthError,
    StoreClosedError,
    StoreServerError,
)
from agentlightning.resources import PromptTemplate
from agentlightning.rollouts import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from agentlightning.server.app import Server
from agentlightning.span import Span
from agentlightning.store import LightningStore, LightningStoreBase, paging
from agentlightning.store.base import IMPLEMENTED
from agentlightning.store.http import client as client_module

Store = LightningStoreBase


class LossyProxy:
    """A TCP proxy that can close connections: before it passes on a request, or before its response."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.requests = 0
        self.lose_requests = 0
        self.lose_responses = 0

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> LossyProxy:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._server.host, self._server.port)
        self._writers |= {writer, back}
        await asyncio.gather(self._pump(reader, back, "lose_requests"), self._pump(there, writer, "lose_responses"))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, loss: str) -> None:
        try:
            while data := await reader.read(1 << 20):
                calls = data.count(b"POST /v1/agl") if loss == "lose_requests" else data.count(b"HTTP/1.1 200")
                self.requests += calls if loss == "lose_requests" else 0
                if calls and getattr(self, loss):
                    setattr(self, loss, getattr(self, loss) - 1)
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()


@pytest.fixture
async def server(store: Store) -> AsyncIterator[Server]:
    async with Server(store, secret="s") as server:
        yield server


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(server) as proxy:
        yield proxy


@pytest.fixture
async def there(proxy: LossyProxy) -> AsyncIterator[LightningStoreClient]:
    """A client behind the proxy."""
    there = LightningStoreClient(proxy.url, patience=20)
    await there.statistics()
    yield there
    await there.close()


async def claimed(store: Store, config: RolloutConfig | None = None) -> AttemptedRollout:
    await store.enqueue_rollout("task", config=config)
    attempted = await store.dequeue_rollout("w1")
    assert attempted is not None
    return attempted


def a_span(attempted: AttemptedRollout, **fields: Any) -> Span:
    return Span(attempted.rollout_id, attempted.attempt.attempt_id, "work", 1.0, **fields)


# -- what is lost on the way is done once ----------------------------------------------------------------------------


@pytest.fixture(params=["lose_requests", "lose_responses"])
def lose(request: pytest.FixtureRequest, proxy: LossyProxy) -> Any:
    """Call it to lose the next request, or the next response."""
    return lambda: setattr(proxy, request.param, 1)


async def test_what_is_lost_while_enqueueing_is_enqueued_once(there: Store, store: Store, lose: Any) -> None:
    lose()
    made = await there.enqueue_rollout("task")
    lose()
    many = await there.enqueue_many_rollouts([EnqueueRolloutRequest(n) for n in range(3)])
    assert [each.rollout_id for each in await store.query_rollouts()] == [each.rollout_id for each in [made, *many]]


async def test_what_is_lost_while_claiming_is_claimed_once(there: Store, store: Store, lose: Any) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n) for n in range(5)])
    lose()
    first = await there.dequeue_many_rollouts(limit=3, worker_id="w1")
    lose()
    second = await there.dequeue_rollout("w1", timeout=5)
    assert second is not None
    assert [each.input for each in [*first, second]] == [0, 1, 2, 3]
    assert len(await store.query_rollouts(status_in=["queuing"])) == 1


async def test_what_is_lost_while_waiting_to_claim_is_claimed_once(
    there: Store, store: Store, proxy: LossyProxy, lose: Any
) -> None:
    waiting = asyncio.create_task(there.dequeue_rollout("w1", timeout=30))
    before = proxy.requests
    for _ in range(1000):
        if proxy.requests >= before + 2:
            break
        await asyncio.sleep(0.001)
    lose()
    made = await store.enqueue_rollout("task")
    attempted = await waiting
    assert attempted is not None
    assert (attempted.rollout_id, attempted.attempt.sequence_id) == (made.rollout_id, 1)


async def test_what_is_lost_while_starting_is_started_once(there: Store, store: Store, lose: Any) -> None:
    lose()
    started = await there.start_rollout("task")
    lose()
    again = await there.start_attempt(started.rollout_id)
    assert (started.attempt.sequence_id, again.attempt.sequence_id) == (1, 2)
    assert len(await store.query_attempts(started.rollout_id)) == 2


async def test_what_is_lost_while_adding_spans_is_added_once(there: Store, store: Store, lose: Any) -> None:
    attempted = await claimed(store)
    lose()
    one = await there.add_span(a_span(attempted))
    lose()
    two = await there.add_many_spans([a_span(attempted), a_span(attempted)])
    lose()
    number = await there.get_next_span_sequence_id(attempted.rollout_id, attempted.attempt.attempt_id)
    assert [span.sequence_id for span in [one, *two]] == [1, 2, 3]
    assert number == 4
    assert await store.query_spans(attempted.rollout_id) == [one, *two]


async def test_what_is_lost_while_reporting_is_reported_once(there: Store, store: Store, lose: Any) -> None:
    attempted = await claimed(store, RolloutConfig(max_attempts=2))
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    lose()
    failed = await there.update_attempt(*ids, status="failed")
    assert (failed.status, "superseded" in failed.metadata) == ("failed", False)
    second = await store.dequeue_rollout()
    assert second is not None
    lose()
    assert (await there.requeue_rollout(attempted.rollout_id, "once more")).status == "requeuing"
    lose()
    assert (await there.cancel_rollout(attempted.rollout_id)).status == "cancelled"
    lose()
    assert await there.delete_rollouts([attempted.rollout_id]) == 1


async def test_what_is_lost_while_publishing_is_published_once(there: Store, store: Store, lose: Any) -> None:
    lose()
    first = await there.add_resources({"prompt": PromptTemplate(template="{x}")})
    lose()
    changed = await there.update_resources(first.resources_id, {"prompt": PromptTemplate(template="{y}")})
    assert (first.version, changed.version) == (1, 2)
    assert await store.query_resources() == [changed]


# -- a server that goes away -----------------------------------------------------------------------------------------


async def test_calls_outlive_a_restart_of_the_server(tmp_path: Any) -> None:
    store = LightningStore(tmp_path / "store.db")
    server = await Server(store, secret="s").start()
    there = LightningStoreClient(server.url, patience=30)
    attempted = await claimed(there)
    parked = asyncio.create_task(there.dequeue_rollout(timeout=60))
    watching = asyncio.create_task(there.wait_for_rollouts(rollout_ids=[attempted.rollout_id]))
    await asyncio.sleep(0.05)
    await server.stop()
    await store.close()
    adding = [asyncio.create_task(there.add_span(a_span(attempted))) for _ in range(20)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in (*adding, parked, watching))
    store = LightningStore(tmp_path / "store.db")
    async with Server(store, secret="s", port=server.port):
        assert sorted([(await task).sequence_id for task in adding]) == list(range(1, 21))
        made = await there.enqueue_rollout("next")
        taken = await parked
        assert taken is not None
        assert taken.rollout_id == made.rollout_id
        await there.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")
        assert [rollout.status for rollout in await watching] == ["succeeded"]
        await there.close()
    await store.close()


@pytest.mark.slow
async def test_patience_begins_when_the_server_goes_away(store: Store) -> None:
    server = await Server(store, secret="s").start()
    there = LightningStoreClient(server.url, patience=1.5)
    parked = asyncio.create_task(there.dequeue_rollout(timeout=60))
    await asyncio.sleep(1.6)  # longer than its patience
    await server.stop()
    await asyncio.sleep(0.2)
    assert not parked.done()
    async with Server(store, secret="s", port=server.port):
        made = await there.enqueue_rollout("task")
        taken = await parked
        assert taken is not None
        assert taken.rollout_id == made.rollout_id
        await there.close()


async def test_where_nobody_answers_the_error_names_the_address_and_what_to_do(server: Server) -> None:
    url = server.url
    await server.stop()
    there = LightningStoreClient(url, patience=0.2)
    with pytest.raises(StoreServerError, match=rf"{url}.*agl serve"):
        await there.enqueue_rollout("task")
    with pytest.raises(StoreServerError, match=url):
        await there.dequeue_rollout(timeout=30)
    await there.close()


@pytest.mark.parametrize(
    ("status", "kind", "body", "said"),
    [
        (200, "text/html", b"<html>Welcome</html>", "not a store of Agent Lightning.*text/html"),
        (404, "application/json", b'{"detail":"Not Found"}', "not a store of Agent Lightning.*404"),
        (200, "application/json", b'{"status":"ok"}', r"0\.x \(protocol 0\).*upgrade the server"),
        (200, "application/json", b'{"status":"ok","version":"9.1","protocol":9}', r"9\.1 \(protocol 9\).*the client"),
        (200, "application/json", b"[]", "not a store of Agent Lightning"),
        (200, "application/json", b"{", "not a store of Agent Lightning"),
    ],
)
async def test_a_server_of_another_kind_or_version_is_told_apart(
    status: int, kind: str, body: bytes, said: str
) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(reply, "127.0.0.1", 0)
    there = LightningStoreClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", patience=5)
    with pytest.raises(StoreServerError, match=said):
        await there.statistics()
    with pytest.raises(StoreServerError, match=said):
        await there.enqueue_rollout("task")
    await there.close()
    listener.close()


async def test_without_the_right_token_the_error_says_so_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(store, secret="s", token="right") as server:
        for token in (None, "wrong"):
            there = LightningStoreClient(server.url, token)
            with pytest.raises(StoreAuthError, match="AGL_TOKEN"):
                await there.enqueue_rollout("task")
            await there.close()
        monkeypatch.setenv("AGL_TOKEN", "right")
        for there in (LightningStoreClient(server.url, "right"), LightningStoreClient(server.url)):
            await there.enqueue_rollout("task")
            await there.close()


@pytest.mark.parametrize(
    "url",
    [
        "localhost:4747",
        "ftp://x",
        "http://",
        "postgresql://x/y",
        "http://u:p@x",
        "http://x?a=b",
        "http://x:99999",
        "http://[x",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        LightningStoreClient(url)


@pytest.mark.parametrize("wishes", [{"token": ""}, {"token": "a b"}, {"token": "ä"}, {"timeout": 0}, {"patience": -1}])
def test_what_is_no_setting_is_refused(wishes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LightningStoreClient("http://127.0.0.1:4747", **wishes)


# -- generated methods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [((), {}), (("r1", "why", "more"), {}), (("r1",), {"rollout_id": "r1", "reason": ""}), (("r1", "why"), {"x": 1})],
)
async def test_wrong_arguments_are_a_type_error(positional: Any, keywords: Any) -> None:
    store = LightningStoreClient("http://127.0.0.1:1")
    with pytest.raises(TypeError):
        await store.requeue_rollout(*positional, **keywords)


async def test_a_filter_may_have_any_value(there: Store, store: Store) -> None:
    attempted = await claimed(store)
    for name in ("and", "asc", "other"):
        await store.add_span(Span(attempted.rollout_id, attempted.attempt.attempt_id, name, 1.0))
    for name in ("and", "asc"):
        assert [span.name for span in await there.query_spans(attempted.rollout_id, name=name)] == [name]


# -- together --------------------------------------------------------------------------------------------------------


async def test_calls_made_together_travel_together(there: Store, store: Store, proxy: LossyProxy) -> None:
    before = proxy.requests
    made = await asyncio.gather(*(there.enqueue_rollout(n) for n in range(200)))
    assert proxy.requests - before < 10
    assert sorted(rollout.input for rollout in made) == list(range(200))


async def test_it_works_on_where_every_task_of_the_loop_was_cancelled(store: Store, hub: StoreHub) -> None:
    there = LightningStoreClient(hub.serve(store))
    for _ in range(2 * client_module.MAX_REQUESTS_IN_FLIGHT):
        asyncio.create_task(there.get_worker("w1"))  # noqa: RUF006  it is cancelled
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await there.enqueue_rollout("afterwards")
    assert len(await store.query_rollouts()) == 1
    await there.close()


async def test_a_bad_call_fails_alone(there: Store) -> None:
    def bad(n: int) -> Any:
        return there.cancel_rollout("nope") if n % 3 == 1 else there.update_worker("w", lease_seconds="x")  # pyright: ignore

    results = await asyncio.gather(
        *(there.enqueue_rollout(n) if n % 3 == 0 else bad(n) for n in range(30)), return_exceptions=True
    )
    for n, result in enumerate(results):
        expected = {0: type(None), 1: NotFoundError, 2: ConfigError}[n % 3]
        assert isinstance(result, expected) or (n % 3 == 0 and result.input == n)


async def test_errors_are_those_of_the_store(there: Store) -> None:
    attempted = await claimed(there)
    await there.update_attempt(attempted.rollout_id, "latest", status="succeeded")
    with pytest.raises(ConflictError, match="succeeded"):
        await there.start_attempt(attempted.rollout_id)


async def test_a_request_that_is_too_large_says_how_large_it_may_be(store: Store, hub: StoreHub) -> None:
    there = LightningStoreClient(hub.serve(store, max_body_bytes=3_000_000))
    attempted = await claimed(there)
    with pytest.raises(ConfigError, match="3000000"):
        await there.add_span(a_span(attempted, attributes={"text": "a" * 9_000_000}))
    assert (await there.add_span(a_span(attempted))).sequence_id == 1
    await there.close()


async def test_long_lists_are_read_in_pages(there: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "PAGE", 10)
    await there.enqueue_many_rollouts([EnqueueRolloutRequest(n, rollout_id=f"r{n:02}") for n in range(35)])

    async def found(**wishes: Any) -> list[str]:
        return [rollout.rollout_id for rollout in await there.query_rollouts(**wishes)]

    names = [f"r{n:02}" for n in range(35)]
    assert await found() == names
    assert await found(limit=20) == names[:20]
    assert await found(limit=15, offset=17) == names[17:32]
    assert await found(after="r20", limit=12) == names[21:33]
    assert await found(newest_first=True, limit=12) == names[::-1][:12]
    attempted = await claimed(there)
    await there.add_many_spans([a_span(attempted) for _ in range(25)])
    assert [span.sequence_id for span in await there.query_spans(attempted.rollout_id)] == list(range(1, 26))
    newest = await there.query_spans(attempted.rollout_id, sort_order="desc", offset=2)
    assert [span.sequence_id for span in newest] == list(range(23, 0, -1))


async def test_waiting_goes_on_over_many_requests(
    there: Store, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "WAIT_SECONDS", 0.02)
    before = proxy.requests
    waiting = asyncio.create_task(there.dequeue_rollout(timeout=60))
    for _ in range(1000):
        if proxy.requests > before + 4:
            break
        await asyncio.sleep(0.005)
    assert not waiting.done()
    made = await there.enqueue_rollout("task")
    attempted = await waiting
    assert attempted is not None
    watching = asyncio.create_task(there.wait_for_rollouts(rollout_ids=[made.rollout_id]))
    await asyncio.sleep(0.1)
    await there.update_attempt(made.rollout_id, "latest", status="succeeded")
    assert [rollout.status for rollout in await watching] == ["succeeded"]


async def test_a_cancelled_claim_is_given_back(there: Store, store: Store) -> None:
    for _ in range(20):
        await store.enqueue_rollout("task")
        claiming = asyncio.create_task(there.dequeue_rollout("w1"))
        await asyncio.sleep(0)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        attempted = await store.dequeue_rollout(timeout=10)
        assert attempted is not None
        await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")


# -- loops, threads, processes ---------------------------------------------------------------------------------------


async def test_one_client_serves_many_event_loops(there: Store, store: Store) -> None:
    def work() -> None:
        async def enqueue() -> None:
            await asyncio.gather(*(there.enqueue_rollout(n) for n in range(10)))

        asyncio.run(enqueue())
        asyncio.run(enqueue())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    await there.enqueue_rollout("here")
    assert len(await store.query_rollouts()) == 61


async def test_a_closed_client_is_closed_for_every_loop(there: LightningStoreClient) -> None:
    started, ended = threading.Event(), []

    def wait() -> None:
        async def dequeue() -> None:
            started.set()
            await there.dequeue_rollout(timeout=60)

        try:
            asyncio.run(dequeue())
        except StoreClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    await asyncio.to_thread(started.wait, 10)
    await asyncio.sleep(0.05)
    await there.close()
    await asyncio.to_thread(thread.join, 10)
    assert len(ended) == 1


async def test_a_forked_process_is_told_to_open_its_own(
    there: LightningStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module.os, "getpid", os.getppid)
    with pytest.raises(StoreClosedError, match="parent process"):
        await there.enqueue_rollout("task")


async def test_it_can_be_pickled(there: LightningStoreClient) -> None:
    copy = pickle.loads(pickle.dumps(there))
    assert copy.url == there.url
    made = await copy.enqueue_rollout("task")
    assert await there.get_rollout_by_id(made.rollout_id) == made
    await copy.close()


def test_its_methods_are_those_of_the_contract() -> None:
    for name, method in inspect.getmembers(LightningStoreBase, inspect.isfunction):
        if name.startswith("_"):
            continue
        assert inspect.signature(method) == inspect.signature(getattr(LightningStoreClient, name)), name
        if name in IMPLEMENTED:
            assert getattr(LightningStoreClient, name) is not method, f"{name} is not done remotely"
