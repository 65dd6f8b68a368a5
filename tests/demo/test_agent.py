"""The demo's agent, against a scripted endpoint on loopback."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning.demo.agent import SYSTEM, calculator, client, solve


class ScriptedModel:
    """Answers chat completions with the given messages, one after the other, and records the requests."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.base_url = ""

    async def complete(self, request: Request) -> JSONResponse:
        self.requests.append(await request.json())
        answer = self.answers.pop(0)
        choice = {"index": 0, "message": {"role": "assistant", **answer}, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return JSONResponse(body)


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    scripted = ScriptedModel()
    app = Starlette(routes=[Route("/some/prefix/v1/chat/completions", scripted.complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    scripted.base_url = f"http://127.0.0.1:{port}/some/prefix/v1"
    yield scripted
    client().close()
    client.cache_clear()
    server.should_exit = True
    thread.join()


def call(arguments: str, id: str = "call_1") -> dict[str, Any]:
    function = {"name": "calculator", "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def test_it_asks_the_calculator_and_reads_its_answer_in_a_second_call(model: ScriptedModel) -> None:
    model.answers = [call('{"expression": "6*7"}'), {"content": "### ANSWER: 42 ###"}]
    assert solve("Six times seven?", model.base_url) == "### ANSWER: 42 ###"
    first, second = model.requests
    assert first["tools"][0]["function"]["name"] == "calculator"
    assert [m["content"] for m in first["messages"]] == [SYSTEM, "Six times seven?"]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"expression": "6*7"}'
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "42"}


def test_it_takes_an_answer_given_at_once(model: ScriptedModel) -> None:
    model.answers = [{"content": "### ANSWER: 41 ###"}]
    assert solve("Six times seven?", model.base_url) == "### ANSWER: 41 ###"


def test_bad_tool_arguments_become_an_error_the_model_can_read(model: ScriptedModel) -> None:
    model.answers = [call("6 times 7"), call('{"expression": "6*7"}', id="call_2"), {"content": "### ANSWER: 42 ###"}]
    assert solve("Six times seven?", model.base_url) == "### ANSWER: 42 ###"
    assert model.requests[1]["messages"][3]["content"].startswith("error: ")
    assert model.requests[2]["messages"][5]["content"] == "42"


def test_it_gives_up_after_four_turns(model: ScriptedModel) -> None:
    model.answers = [call('{"expression": "1+1"}')] * 9
    assert solve("Six times seven?", model.base_url) == ""
    assert len(model.requests) == 4


@pytest.mark.parametrize(
    ("expression", "result"), [("12+3*4-5", "19"), ("(2+3)*4", "20"), ("-3+5", "2"), ("7/2", "3.5"), ("98", "98")]
)
def test_the_calculator_knows_arithmetic(expression: str, result: str) -> None:
    assert calculator(json.dumps({"expression": expression})) == result


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"expression": 7}',
        '{"expression": null}',
        '{"expression": ""}',
        '{"expression": "1/0"}',
        '{"expression": "2**99999999"}',
        '{"expression": "012+1"}',
        '{"expression": "__import__(\'os\').getcwd()"}',
        '{"expression": "x"}',
        '{"expression": "\\u0000"}',
        json.dumps({"expression": "(" * 199}),
        json.dumps({"expression": "1+" * 5000 + "1"}),
    ],
)
def test_the_calculator_answers_nonsense_with_an_error(arguments: str) -> None:
    assert calculator(arguments).startswith("error: ")
