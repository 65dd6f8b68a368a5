"""What a trainer tells the gateways that it has joined, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from agentlightning.config import RunConfig, TrainConfig
from agentlightning.engine.servers.joining import JoinRequest, JoinStatus
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
            told.append((url, content["pause"] is not None))
            if not path.endswith("/state"):
                joining.set()
                await may_join.wait()
            return JoinStatus(paused=content["pause"] is not None).model_dump()

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
