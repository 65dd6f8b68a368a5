"""SGLang's own ways, as its documentation has them: what its events repeat, and how its weights are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.model_server import ScriptedModelServer
from tests.support.proxy import LocalProxy

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.servers.clients.http import ModelServerError, SampleRequest, TokenChunk
from agentlightning.transport import Transport
from agentlightning.transport.options import ConnectOptions
from agentlightning_sglang import SGLangServer

DRAWN = [[-0.1, 5, None], [-0.2, 6, None], [-0.3, 7, None], [-0.4, 8, None]]
TOPS = [[[-0.05, 9, None], [-0.1, 5, None]]] * 4


def event(drawn: list[Any], count: int, reason: str | None = None) -> dict[str, Any]:
    finish = None if reason is None else {"type": reason}
    meta = {"output_token_logprobs": drawn, "completion_tokens": count, "finish_reason": finish}
    return {"meta_info": {**meta, "output_top_logprobs": TOPS[: len(drawn)]}}


class Scripted(SGLangServer):
    """A server whose responses are those given."""

    def __init__(self, *responses: Any) -> None:
        super().__init__(Transport(), "http://127.0.0.1:1")
        self.responses = responses

    async def _complete(self, path: str, body: Any, request: SampleRequest, read: Any) -> Any:
        return [read(each) for each in self.responses]


def request(top_logprobs: int = 0) -> SampleRequest:
    return SampleRequest("tiny", (5,), SamplingParams(top_logprobs=top_logprobs), 4, frozenset())


@pytest.mark.parametrize("repeats", [True, False])
async def test_cumulative_and_incremental_events_give_the_same_answer(repeats: bool):
    runs: list[TokenChunk] = []
    server = Scripted(
        *(
            event(DRAWN[0 if repeats else start : end], end, "length" if end == 4 else None)
            for start, end in ((0, 1), (1, 3), (3, 4))
        )
    )
    ends: Any = await server.sample(request(2), runs.append, stream=True)
    assert [token for run in runs for token in run.token_ids] == [5, 6, 7, 8]
    assert [value for run in runs for value in run.logprobs] == [-0.1, -0.2, -0.3, -0.4]
    assert [len(run.token_ids) for run in runs] == [1, 2, 1]
    assert [top for run in runs for top in run.top_logprobs] == [((9, -0.05), (5, -0.1))] * 4
    assert [end and end.finish_reason for end in ends] == [None, None, "length"]


@pytest.mark.parametrize("answer", [{}, {"meta_info": {}}, [], event(DRAWN, 4, "abort")])
async def test_malformed_responses_are_server_errors(answer: Any):
    with pytest.raises(ModelServerError) as failed:
        await Scripted(answer).sample(request(), lambda _: None, stream=False)
    assert failed.value.retryable


async def test_a_proxy_rejection_is_not_retryable(tmp_path: Path):
    async with LocalProxy("me:secret") as proxy:
        transport = Transport(ConnectOptions.create(proxy.url))
        with pytest.raises(ModelServerError, match="requires credentials") as failed:
            await SGLangServer(transport, "https://model.example").weight_label()
        await transport.close()
    assert not failed.value.retryable


async def test_weights_are_replaced_while_answers_wait_without_their_caches(tmp_path: Path):
    transport = Transport()
    async with ScriptedModelServer(dialect="sglang") as server:
        backend = SGLangServer(transport, server.url)
        await backend.load_weights(tmp_path, "v7", lambda: None)
        assert server.calls == [
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "v7", "flush_cache": True}),
            ("/continue_generation", {}),
        ]
        assert await backend.weight_label() == "v7"
        await backend.load_adapter("critic", tmp_path)
        await backend.sample(
            SampleRequest("critic", (5,), SamplingParams(), 1, frozenset(), True), lambda _: None, stream=False
        )
        path, body = server.calls[-1]
        assert (path, body["lora_path"], body["sampling_params"]["max_new_tokens"]) == ("/generate", "critic", 1)
        await backend.unload_adapter("critic")
        assert not server.adapters
    await transport.close()


async def test_an_update_that_sglang_reports_as_failed_raises(tmp_path: Path):
    transport = Transport()
    async with ScriptedModelServer(dialect="sglang") as server:
        server._update = lambda body: {"success": False, "message": "no such file"}  # type: ignore[method-assign]
        with pytest.raises(ModelServerError, match="no such file"):
            await SGLangServer(transport, server.url).load_weights(tmp_path, "v7", lambda: None)
    await transport.close()
