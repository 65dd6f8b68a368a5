"""What a trainer tells the gateways that it has joined, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

import pytest

from agentlightning.config import RunConfig, TrainConfig
from agentlightning.engine.servers.clients.http import ModelServerError
from agentlightning.engine.servers.joining import JoinRequest, JoinStatus
from agentlightning.errors import ConfigError
from agentlightning.policy.served import ServedPolicy
from agentlightning.training.joined_gateways import JoinedGateways


async def test_a_lost_gateway_that_joins_again_as_an_update_begins_holds_its_calls_back(monkeypatch) -> None:
    config = TrainConfig(run=RunConfig(gateways=("http://127.0.0.1:9", "http://127.0.0.1:10")))
    joined = JoinedGateways(config, None, "run-1", lambda text: None)
    servers = SimpleNamespace(weights=None, adapters={})
    joined._policy = cast(ServedPolicy, SimpleNamespace(servers=servers))
    joined._request = JoinRequest.model_construct(run_id="run-1")
    here, lost = joined._gateways
    here.joined, lost.lost = True, True
    told: list[tuple[str, bool]] = []
    joining, may_join = asyncio.Event(), asyncio.Event()

    def answering(url: str):
        async def post(path: str, content: dict[str, Any]) -> Any:
            told.append((url, content["paused"]))
            if not path.endswith("/state"):
                joining.set()
                await may_join.wait()
            return JoinStatus(paused=content["paused"]).model_dump()

        return post

    for gateway in joined._gateways:
        monkeypatch.setattr(gateway, "post", answering(gateway.url))
    coming_back = asyncio.create_task(joined._tell(lost))
    await joining.wait()
    asyncio.get_running_loop().call_later(0.05, may_join.set)
    async with joined.updating():
        assert lost.joined
        assert told[-1] == (lost.url, True)
    assert told[-1][1] is False
    await coming_back
    await joined.close()


async def test_a_run_outlives_an_answer_that_is_none_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a load balancer gives, whose servers are being started again."""
    config = TrainConfig(run=RunConfig(gateways=("http://127.0.0.1:9",), gateway_lease_seconds=1.0))
    joined = JoinedGateways(config, None, "run-1", lambda text: None)
    servers = SimpleNamespace(weights=None, adapters={}, remove_unused=lambda: None)
    joined._policy = cast(ServedPolicy, SimpleNamespace(servers=servers))
    (gateway,) = joined._gateways
    gateway.joined = True
    answers: list[Any] = [None, [], {"detail": "starting"}]
    renewed = asyncio.Event()

    async def post(path: str, content: dict[str, Any]) -> Any:
        if answers:
            return answers.pop()
        renewed.set()
        return JoinStatus().model_dump()

    monkeypatch.setattr(gateway, "post", post)
    renewing = asyncio.create_task(joined._renew(gateway))
    await asyncio.wait_for(renewed.wait(), 5)
    renewing.cancel()
    await joined.close()


async def test_a_run_that_one_gateway_refuses_leaves_those_that_were_slower_to_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name is free for the next run at once, not when the lease has ended."""
    config = TrainConfig(run=RunConfig(gateways=("http://127.0.0.1:9", "http://127.0.0.1:10")))
    joined = JoinedGateways(config, None, "run-1", lambda text: None)
    refusing, slow = joined._gateways

    async def refuse(path: str, content: dict[str, Any]) -> Any:
        raise ModelServerError("another version", retryable=False, status=422)

    async def take(path: str, content: dict[str, Any]) -> Any:
        await asyncio.sleep(0.05)
        return JoinStatus().model_dump()

    monkeypatch.setattr(refusing, "post", refuse)
    monkeypatch.setattr(slow, "post", take)
    request = JoinRequest.model_construct(run_id="run-1")
    with pytest.raises(ConfigError, match=r"cannot join its gateways: .*another version"):
        await joined._ask("", request)
    assert joined._here == [slow], "which is left with the others"
    await joined.close()


async def test_a_chat_format_that_cannot_be_sent_to_a_gateway_is_refused_by_name() -> None:
    """Such as that of a model of one's own, which model servers serve."""

    class ChatOfOnesOwn: ...

    config = TrainConfig(run=RunConfig(gateways=("http://127.0.0.1:9",)))
    joined = JoinedGateways(config, None, "run-1", lambda text: None)
    policy = create_autospec(ServedPolicy, instance=True, chat=ChatOfOnesOwn())
    with pytest.raises(ConfigError, match="ChatOfOnesOwn is no tokenizer of transformers"):
        async with joined.join(policy):
            pass
    await joined.close()
