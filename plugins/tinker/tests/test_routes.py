"""What the Tinker API over a local model promises its clients, request by request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.models import tiny_checkpoint

from agentlightning.errors import PolicyError
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.losses import NLLLoss
from agentlightning.server.app import Server
from agentlightning.store.sql.store import SqlStore
from agentlightning_tinker.server import wire
from agentlightning_tinker.server.host import AdapterHost
from agentlightning_tinker.server.routes import LINK_SECONDS, tinker_routes
from agentlightning_tinker.server.service import TinkerService
from agentlightning_tinker.server.wire import (
    AdamParams,
    CreateModel,
    CreateSampler,
    CreateSession,
    Datum,
    LoraShape,
    SampleRequest,
    SaveForSampler,
)

TOKENS = list(range(5, 15))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def client(model: Path, tmp_path: Path) -> AsyncIterator[Client]:
    host = AdapterHost.open(LocalPolicyConfig(model=model, name="tiny", device="cpu"))
    host.max_copies = 2
    store = SqlStore(":memory:")
    async with (
        tinker_routes([host], tmp_path / "saved", "secret") as pages,
        Server(store, secret="s", pages=pages, grace_seconds=1) as server,
        httpx.AsyncClient(base_url=f"{server.url}/api/v1", headers={"x-api-key": "tml-secret"}) as http,
    ):
        yield Client(http, host)
    await store.close()


class Client:
    def __init__(self, http: httpx.AsyncClient, host: AdapterHost) -> None:
        self.http, self.host = http, host
        self.session, self.model, self.seq = "", "", 0

    async def post(self, path: str, status: int = 200, /, **body: Any) -> dict[str, Any]:
        response = await self.http.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def result(self, request_id: str) -> Any:
        response = await self.http.post("/retrieve_future", json={"request_id": request_id})
        assert response.status_code == 200, response.text
        return response.content if "protobuf" in response.headers["content-type"] else response.json()

    async def begin(self, **lora: Any) -> None:
        self.session = (await self.post("/create_session", sdk_version="0.38.0", tags=[]))["session_id"]
        shape = {"rank": 4, "seed": 1, **lora}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": shape}
        self.model = (await self.result((await self.post("/create_model", **body))["request_id"]))["model_id"]

    def number(self) -> int:
        self.seq += 1
        return self.seq

    async def gradient(self, loss: str = "ppo", *, seq: int | None = None, **inputs: Any) -> Any:
        response = await self.http.post(
            "/forward_backward",
            content=request(self.model, seq or self.number(), loss, **inputs),
            headers={"content-type": "application/x-protobuf"},
        )
        assert response.status_code == 200, response.text
        return await self.result(response.json()["request_id"])

    async def step(self, **adam: Any) -> Any:
        body = {"model_id": self.model, "seq_id": self.number(), "adam_params": {"learning_rate": 1e-2, **adam}}
        return await self.result((await self.post("/optim_step", **body))["request_id"])

    async def sampler(self) -> str:
        body = {"model_id": self.model, "seq_id": self.number(), "sampling_session_seq_id": self.seq}
        found = await self.result((await self.post("/save_weights_for_sampler", **body))["request_id"])
        return found["sampling_session_id"]

    async def sample(self, sampler: str, **settings: Any) -> Any:
        body = {
            "sampling_session_id": sampler,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
            "sampling_params": {"max_tokens": 6, "temperature": 0.0, "stop": [], **settings},
        }
        message = wire.proto.SampleResponse.FromString(
            await self.result((await self.post("/asample", **body))["request_id"])
        )
        return np.frombuffer(message.sequences[0].tokens, "<i4").tolist()


def request(
    model: str, seq: int, loss: str, *, image: bool = False, forward_only: bool = False, **inputs: Any
) -> bytes:
    message = wire.proto.ForwardBackwardRequest()
    message.model_id, message.seq_id, message.loss_fn, message.forward_only = model, seq, loss, forward_only
    datum = message.data.add()
    chunk = datum.model_input.add()
    if image:
        chunk.image.SetInParent()
    else:
        chunk.encoded_text.tokens = np.asarray(TOKENS[:-1], "<i4").tobytes()
    count = len(TOKENS) - 1
    given = {"target_tokens": TOKENS[1:], "logprobs": [-5.0] * count, "advantages": [1.0] * count, **inputs}
    for name, values in given.items():
        if values is None:
            continue
        entry = datum.loss_fn_inputs[name]
        whole = name == "target_tokens"
        entry.dtype = wire.proto.DTYPE_INT64 if whole else wire.proto.DTYPE_FLOAT32
        entry.dense = np.asarray(values, "<i8" if whole else "<f4").tobytes()
        entry.shape.append(len(values))
    return message.SerializeToString()


async def test_a_key_is_needed_for_all_but_the_health_check(client: Client) -> None:
    async with httpx.AsyncClient(base_url=str(client.http.base_url)) as stranger:
        assert (await stranger.get("/healthz")).json() == {"status": "ok"}
        for path in ("/create_session", "/telemetry", "/retrieve_future", "/whatever"):
            response = await stranger.post(path, json={})
            assert (response.status_code, "TINKER_API_KEY" in response.json()["error"]) == (401, True)


async def test_old_packages_are_told_what_to_install(client: Client) -> None:
    for version in ("0.9.1", "0.29.0"):
        assert "0.30 or newer" in (await client.post("/client/config", 400, sdk_version=version))["error"]
    for version in ("0.30.0", "1.2.0", "unknown"):
        await client.post("/client/config", sdk_version=version)
    await client.begin()
    response = await client.http.post("/forward_backward", json={"model_id": client.model, "seq_id": 1})
    assert (response.status_code, "application/x-protobuf" in response.json()["error"]) == (400, True)
    assert "not offered" in (await client.post("/copy_weights", 404))["error"]


async def test_a_refused_request_does_not_hold_up_those_after_it(client: Client) -> None:
    await client.begin()
    assert "not offered" in (await client.gradient("dro"))["error"]
    assert "advantages" in (await client.gradient(advantages=None))["error"]
    assert "9 tokens" in (await client.gradient(advantages=[1.0]))["error"]
    assert "image" in (await client.gradient(image=True))["error"]
    assert "one of the" in (await client.gradient(target_tokens=[99999] * 9))["error"]
    assert "learning_rate" in (await client.step(learning_rate=-1))["error"]
    assert "nesterov" in (await client.step(nesterov=True))["error"]
    assert "no gradient" in (await client.step())["error"]
    assert isinstance(await client.gradient(), bytes)
    assert (await client.step())["metrics"]["grad_norm:mean"] > 0


async def test_a_loss_that_is_not_finite_changes_no_weight(client: Client) -> None:
    await client.begin()
    before = await client.sample(await client.sampler())
    failed = await client.gradient(logprobs=[float("nan")] * 9)
    assert (failed["category"], "not finite" in failed["error"]) == ("server", True)
    assert "no gradient" in (await client.step())["error"]
    assert await client.sample(await client.sampler()) == before


async def test_a_gradient_that_fails_half_way_is_dropped(model: Path) -> None:
    host = AdapterHost.open(LocalPolicyConfig(model=model, name="tiny", device="cpu"))
    host.token_budget = 4
    await host.run(host.create, "a", LoraShape(rank=4))
    datum = Datum(tuple(TOKENS[:4]), tuple(TOKENS[1:5]), {"weights": np.ones(4, np.float32)})
    passed: list[Any] = []

    class Failing(NLLLoss):
        def __call__(self, tokens: Any) -> Any:
            passed.append(tokens)
            if len(passed) == 2:
                raise MemoryError
            return super().__call__(tokens)

    with pytest.raises(PolicyError, match="out of memory"):
        await host.run(host.gradient, "a", [datum, datum], Failing())
    with pytest.raises(PolicyError, match="no gradient"):
        await host.run(host.optim_step, "a", AdamParams())
    await host.close()


async def test_a_forward_pass_leaves_the_gradient_as_it_is(client: Client) -> None:
    await client.begin()
    await client.gradient()
    assert isinstance(await client.gradient(forward_only=True, logprobs=[float("nan")] * 9), bytes)
    assert (await client.step())["metrics"]["grad_norm:mean"] > 0


async def test_requests_run_in_their_order_and_once_however_they_arrive(client: Client) -> None:
    await client.begin()
    late = [request(client.model, number, "ppo") for number in (3, 2, 1)]
    headers = {"content-type": "application/x-protobuf"}
    ids = []
    for body in (late[0], late[1], late[1], late[2]):
        ids.append((await client.http.post("/forward_backward", content=body, headers=headers)).json()["request_id"])
        if body is not late[2]:
            await asyncio.sleep(0.05)
    assert ids[1] == ids[2], "sent again, it is the same request"
    results = [await client.result(each) for each in ids]
    assert all(isinstance(each, bytes) for each in results), results
    client.seq = 3
    once = (await client.step())["metrics"]["grad_norm:mean"]
    await client.gradient()
    single = (await client.step(learning_rate=0.0))["metrics"]["grad_norm:mean"]
    assert once > 2 * single > 0, "three gradients, and none twice"


async def test_samplers_keep_the_weights_they_began_with_also_beyond_those_in_memory(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [], client.host._read_copy
    monkeypatch.setattr(client.host, "_read_copy", lambda copy, unused: reads.append(copy) or read(copy, unused))
    await client.begin()
    samplers, answers = [], []
    for _ in range(4):
        samplers.append(await client.sampler())
        answers.append(await client.sample(samplers[-1]))
        await client.gradient()
        await client.step(learning_rate=0.3)
    assert len({tuple(each) for each in answers}) > 1, "the weights have changed"
    assert [await client.sample(each) for each in samplers] == answers
    assert len(reads) > 4, "two are in memory"
    await client.post(f"/sessions/{client.session}/finish")
    assert "unknown" in (await client.post("/asample", 404, sampling_session_id=samplers[0], **_prompt()))["error"]
    assert (await client.post("/session_heartbeat", 410, session_id=client.session))["error"]
    assert await client.post("/cancel_future", request_id=f"{client.session}:1") == {}


def _prompt() -> dict[str, Any]:
    return {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {}}


async def test_fields_that_this_server_does_not_know_are_refused_unless_unset(client: Client) -> None:
    await client.begin()
    sampler = await client.sampler()
    body = {"sampling_session_id": sampler, **_prompt()}
    await client.post("/asample", topk_prompt_logprobs=0, prompt_alt_tokens_k=0, **body)
    error = (await client.post("/asample", 400, topk_prompt_logprobs=3, **body))["error"]
    assert "topk_prompt_logprobs=3" in error
    failed = {"model_id": client.model, "seq_id": client.number(), "kind": "inflight", "sampling_session_seq_id": 9}
    found = await client.result((await client.post("/save_weights_for_sampler", **failed))["request_id"])
    assert "kind" in found["error"]


async def test_weights_outlive_the_session_and_names_are_not_taken_twice(client: Client, tmp_path: Path) -> None:
    await client.begin(train_unembed=False)
    await client.gradient()
    await client.step()

    async def save(**more: Any) -> Any:
        body = {"model_id": client.model, "seq_id": client.number(), "path": "a/../b", **more}
        return await client.result((await client.post("/save_weights", **body))["request_id"])

    path = (await save())["path"]
    assert "exists" in (await save())["error"]
    assert (await save(overwrite=True))["path"] == path
    files = {
        each.relative_to(tmp_path / "saved").parts[1] for each in (tmp_path / "saved").rglob("adapter_config.json")
    }
    assert files == {"weights"}, "nothing outside, whatever the name"
    await client.post(f"/sessions/{client.session}/finish")
    session = (await client.post("/create_session"))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    found = await client.result((await client.post("/load_weights", **body))["request_id"])
    assert found["model_id"] == f"{session}:train:0"
    assert (await client.post("/weights_info", tinker_path=path))["train_unembed"] is False
    wrong = await client.post("/weights_info", 400, tinker_path="tinker://x/weights/none")
    assert "no saved weights" in wrong["error"]
    [optimizer] = (tmp_path / "saved").rglob("weights/*/optimizer.pt")
    await asyncio.to_thread(optimizer.write_bytes, b"damaged")
    failed = await client.result((await client.post("/load_weights", **{**body, "model_seq_id": 1}))["request_id"])
    assert "holds no state of an optimiser" in failed["error"]
    [about] = (tmp_path / "saved").rglob("weights/*/tinker.json")
    for damaged in ("[]", "{}", "{"):
        await asyncio.to_thread(about.write_text, damaged)
        assert "no saved weights" in (await client.post("/weights_info", 400, tinker_path=path))["error"]


async def test_a_session_that_is_silent_ends_and_frees_its_adapters(model: Path, tmp_path: Path) -> None:
    host = AdapterHost.open(LocalPolicyConfig(model=model, name="tiny", device="cpu"))
    service = TinkerService([host], tmp_path, session_seconds=0.3)
    watch = asyncio.create_task(service.end_silent_sessions())
    silent, alive = [(await service.create_session(CreateSession()))["session_id"] for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0.1)
        service.session(alive)
    assert set(service.sessions) == {alive} != {silent}
    watch.cancel()
    await service.close()


async def test_what_is_still_made_for_a_session_that_ends_is_forgotten(model: Path, tmp_path: Path) -> None:
    host = AdapterHost.open(LocalPolicyConfig(model=model, name="tiny", device="cpu"))
    service = TinkerService([host], tmp_path)
    session = (await service.create_session(CreateSession()))["session_id"]
    body = {"session_id": session, "base_model": "tiny", "lora_config": LoraShape(rank=4)}
    first = (await service.begin(CreateModel(model_seq_id=0, **body)))["request_id"]
    await service.session(first).fetch(first, 10)
    busy = asyncio.create_task(host.run(lambda: time.sleep(0.2)))
    await asyncio.sleep(0.05)
    await service.begin(CreateModel(model_seq_id=1, **body))
    snapshot = SaveForSampler(model_id=f"{session}:train:0", seq_id=1, sampling_session_seq_id=0)
    service.session(session).start(lambda: service.save_for_sampler(snapshot))
    await asyncio.sleep(0.05)
    assert not busy.done()
    await service.end_session(session)
    assert (host.trained, host._adapters.by_name) == ({}, {})
    assert not await asyncio.to_thread(lambda: list(tmp_path.rglob("adapter_config.json")))
    await service.close()


async def test_a_request_without_its_number_is_told_what_it_lacks(client: Client) -> None:
    await client.begin()
    for path in ("/optim_step", "/save_weights"):
        refused = await client.post(path, 400, model_id=client.model, path="a", adam_params={})
        assert "seq_id" in str(refused)
    begun = {"session_id": client.session, "model_seq_id": 1, "path": "tinker://a/weights/b"}
    assert "seq_id" in str(await client.post("/save_weights", 400, **begun)), "no other model is begun"


async def test_a_file_is_downloaded_by_its_own_url_until_that_expires(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.begin()
    body = {"model_id": client.model, "seq_id": client.number(), "path": "for peft/1"}
    found = await client.result((await client.post("/save_weights_external", **body))["request_id"])
    run, kind, name = found["path"].removeprefix("tinker://").split("/")
    listing = f"/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"
    urls: dict[str, str] = (await client.http.get(listing)).json()["urls"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
    assert "tinker.json" not in urls
    async with httpx.AsyncClient() as anybody:
        files = {file: await anybody.get(url) for file, url in urls.items()}
        assert sum(len(each.content) for each in files.values()) == found["size_bytes"]
        one = urls["adapter_config.json"]
        secret = one.split("/")[-2]
        other = one.replace("adapter_config.json", "adapter_model.safetensors")
        for wrong in (one[:-1], f"{one}x", one.replace(secret, secret[:-1]), other):
            assert (await anybody.get(wrong)).status_code == 403, wrong
        client.http.headers["x-api-key"] = "wrong"
        assert (await client.http.get(listing)).status_code == 401
        later = time.time() + LINK_SECONDS + 1
        monkeypatch.setattr("agentlightning_tinker.server.routes.time.time", lambda: later)
        assert (await anybody.get(one)).status_code == 403


async def test_weights_for_training_are_not_downloaded(client: Client) -> None:
    await client.begin()
    body = {"model_id": client.model, "seq_id": client.number(), "path": "state"}
    path = (await client.result((await client.post("/save_weights", **body))["request_id"]))["path"]
    run, kind, name = path.removeprefix("tinker://").split("/")
    refused = await client.http.get(f"/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
    assert refused.status_code == 400
    assert "save_weights_external" in refused.json()["error"]


async def test_what_cannot_be_sampled_is_refused_at_the_edge(client: Client) -> None:
    await client.begin()
    sampler = await client.sampler()

    async def refused(tokens: Any = None, **request: Any) -> str:
        body = _prompt() | {"sampling_session_id": sampler, **request}
        if tokens is not None:
            body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        return (await client.post("/asample", 400, **body))["error"]

    for tokens in ([-1], [client.host.vocab_size], [2**70], [True], [1.5], [5] * client.host.context_length):
        assert await refused(tokens)
        assert await refused(tokens, prompt_logprobs=True)
    for name, value in {"temperature": 101, "top_k": 2**63, "top_p": 0, "seed": 2**63, "max_tokens": 2**31}.items():
        assert name in await refused(sampling_params={"max_tokens": 1, name: value})
    assert "num_samples" in await refused(num_samples=1025)


async def test_an_answer_of_another_session_does_not_wait_for_a_thousand(model: Path, tmp_path: Path) -> None:
    host = AdapterHost.open(LocalPolicyConfig(model=model, name="tiny", device="cpu", max_batch_size=8))
    service = TinkerService([host], tmp_path)
    try:
        ids: list[str] = []
        for number, samples in enumerate((512, 1, 2)):
            session = (await service.create_session(CreateSession()))["session_id"]
            made = CreateSampler(session_id=session, sampling_session_seq_id=0, base_model="tiny")
            sampler = (await service.create_sampler(made))["sampling_session_id"]
            body = _prompt() | {"sampling_session_id": sampler, "num_samples": samples}
            body["sampling_params"] = {"max_tokens": 4 if number else 64, "stop": []}
            ids.append((await service.sample(SampleRequest.model_validate(body)))["request_id"])
        for short in ids[1:]:
            assert await service.session(short).fetch(short, 60) is not None
        assert await service.session(ids[0]).fetch(ids[0], 0) is None, "the others came first"
    finally:
        await service.close()


async def test_an_answer_of_another_model_does_not_wait_for_a_thousand(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LocalPolicyConfig(model=model, device="cpu", max_batch_size=8)
    names = "policy", "judge"
    hosts = [AdapterHost.open(config.model_copy(update={"name": name})) for name in names]
    service, begun, sample = TinkerService(hosts, tmp_path), list[Any](), hosts[0].sample_copy
    monkeypatch.setattr(hosts[0], "sample_copy", lambda *given: begun.append(given) or sample(*given))
    try:
        ids, session = list[str](), (await service.create_session(CreateSession()))["session_id"]
        for number, base in enumerate(names):
            made = CreateSampler(session_id=session, sampling_session_seq_id=number, base_model=base)
            sampler = (await service.create_sampler(made))["sampling_session_id"]
            body = _prompt() | {"sampling_session_id": sampler, "num_samples": 1 if number else 512}
            body["sampling_params"] = {"max_tokens": 4 if number else 64, "stop": []}
            ids.append((await service.sample(SampleRequest.model_validate(body)))["request_id"])
        assert await service.session(ids[1]).fetch(ids[1], 60) is not None
        assert 0 < len(begun) < 256
    finally:
        await service.close()


async def test_weights_saved_again_are_sampled_by_who_asks_for_them_then(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.begin()
    path, asked, run = "", [], client.host.run

    async def saved() -> str:
        body = {"model_id": client.model, "seq_id": client.number(), "path": "state", "overwrite": True}
        return (await client.result((await client.post("/save_weights", **body))["request_id"]))["path"]

    async def answer() -> Any:
        asked.append(1000 + len(asked))
        body = {"session_id": client.session, "sampling_session_seq_id": asked[-1], "model_path": path}
        return await client.sample((await client.post("/create_sampling_session", **body))["sampling_session_id"])

    before: list[Any] = []

    async def save_slowly(method: Any, *args: Any, **options: Any) -> Any:
        if method == client.host.save_trained:
            before.append(await answer())
        return await run(method, *args, **options)

    path = await saved()
    monkeypatch.setattr(client.host, "run", save_slowly)
    for _ in range(3):
        await client.gradient()
        await client.step(learning_rate=0.3)
    await saved()
    monkeypatch.setattr(client.host, "run", run)
    assert await answer() == await client.sample(await client.sampler()) != before[0]
