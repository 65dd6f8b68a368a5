"""What agent frameworks and coding agents send, replayed by hand: each call is served, and the second turn goes on in
the tokens of the first one wherever the client repeats what it was told.

Bodies have the shape that the real packages send (`tests/frameworks` runs those), without their bulk.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.errors import PolicyError
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.response_store import ResponseLookup

CALL = 'Let me see. <tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
SYSTEM = "You are a calculator."
SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
FUNCTION = {"name": "calculator", "description": "Calculates.", "parameters": SCHEMA}
STRICT = FUNCTION | {"strict": True}
JSON = dict[str, Any]


@dataclass
class Replay:
    """Two turns of one client."""

    path: str
    first: JSON
    second: Callable[[JSON], JSON]
    """The second body, made from the reply to the first as the client understood it."""
    headers: dict[str, str] = field(default_factory=dict)
    continues: bool = True
    """False where the client tells another story than it was told: the second turn is then a new path."""
    ignored: frozenset[str] = frozenset()
    """Fields that mean nothing here."""


# -- chat completions ------------------------------------------------------------------------------------------------


def chat(history: Callable[[JSON], list[JSON]], *, function: JSON = FUNCTION, later: JSON | None = None, **fields: Any):
    """`history` makes, of the message it was answered with, what the client adds to the conversation."""
    options = {name: fields.pop(name) for name in ("headers", "continues", "ignored") if name in fields}
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 6*7?"}]
    body = {"model": "scripted", "messages": asked, "tools": [{"type": "function", "function": function}]} | fields

    def second(message: JSON) -> JSON:
        then = body | {"messages": [*asked, *history(message)]} | (later or {})
        return {name: value for name, value in then.items() if value is not None}

    return Replay("/v1/chat/completions", body, second, **options)


def retold(message: JSON, **more: Any) -> list[JSON]:
    """The answer, and the tool's result."""
    (call,) = message["tool_calls"]
    spoken = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
    return [spoken | more, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]


def compact(message: JSON) -> list[JSON]:
    """pydantic-ai writes the arguments anew."""
    spoken, result = retold(message)
    (call,) = spoken["tool_calls"]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    return [spoken | {"tool_calls": [call | {"function": call["function"] | {"arguments": arguments}}]}, result]


def as_text(message: JSON) -> list[JSON]:
    """smolagents tells calls and results as text."""
    text = f"{message['content']}\nCalling tools:\n[{message['tool_calls'][0]['function']['arguments']}]"
    return [
        {"role": "assistant", "content": [{"type": "text", "text": text}]},
        {"role": "user", "content": [{"type": "text", "text": "Observation:\n42"}]},
    ]


# -- responses -------------------------------------------------------------------------------------------------------


def responses(items: Callable[[JSON], list[JSON]], by_id: bool = False, **fields: Any) -> Replay:
    """`items` makes, of the reply, what the client adds to the conversation; `by_id` sends nothing else again."""
    options = {name: fields.pop(name) for name in ("headers", "continues", "ignored") if name in fields}
    asked = fields.pop("input", [{"role": "user", "content": "What is 6*7?"}])
    body = {"model": "scripted", "instructions": SYSTEM, "input": asked, "tools": [{"type": "function", **STRICT}]}
    body |= fields

    def second(reply: JSON) -> JSON:
        if by_id:
            return body | {"input": items(reply), "previous_response_id": reply["id"]}
        return body | {"input": [*asked, *items(reply)]}

    return Replay("/v1/responses", body, second, **options)


def result(reply: JSON) -> list[JSON]:
    (call,) = [item for item in reply["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": "42"}]


def echoed(reply: JSON) -> list[JSON]:
    """The OpenAI Agents SDK and LangChain send items back with whatever keys they came with, and some of their own."""
    items = [item | {"token_ids": [1, 2], "weight_version": 3, "parsed_arguments": None} for item in reply["output"]]
    return [*items, *result(reply)]


# -- messages --------------------------------------------------------------------------------------------------------


def messages(second: Callable[[JSON], list[JSON]], system: Any = SYSTEM, later: JSON | None = None, **fields: Any):
    options = {name: fields.pop(name) for name in ("headers", "continues", "ignored") if name in fields}
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is 6*7?"}]}]
    tool = {"name": "calculator", "description": "Calculates.", "input_schema": SCHEMA}
    body = {"model": "scripted", "max_tokens": 4096, "system": system, "messages": asked, "tools": [tool]} | fields
    return Replay(
        "/v1/messages", body, lambda reply: body | {"messages": [*asked, *second(reply)]} | (later or {}), **options
    )


def blocks(reply: JSON, **more: Any) -> list[JSON]:
    (use,) = [block for block in reply["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "42"}]} | more
    return [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]


def billed(build: str) -> list[JSON]:
    """The system prompt of Claude Code: its first line differs from call to call."""
    return [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197.{build}; cc_entrypoint=cli;"},
        {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
    ]


CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE = {
    "x-claude-code-session-id": "0d1f",
    "x-stainless-retry-count": "0",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
}

REPLAYS = {
    "openai": chat(retold),
    "langchain": chat(lambda m: retold(m, name="assistant"), stream=False),
    "langchain, streamed": chat(lambda m: retold(m, content=m["content"] or ""), stream=True),
    "autogen": chat(lambda m: retold(m, name="math_agent"), tool_choice="auto"),
    "autogen's reflection": chat(retold, later={"tools": None}, continues=False),
    "crewai": chat(retold, function=STRICT, stop=["\nObservation:"]),
    "pydantic-ai": chat(compact, function=STRICT, stream=True, stream_options={"include_usage": True}),
    "smolagents": chat(as_text, tool_choice="required", stop=["Observation:", "Calling tools:"], continues=False),
    "llama-index": chat(retold, stream=True, parallel_tool_calls=True, temperature=0.1, tool_choice="auto"),
    "google-adk": chat(lambda m: retold(m, content=None if m["content"] == "" else m["content"])),
    "openai-agents": responses(echoed, include=[], parallel_tool_calls=None),
    "openai-agents, streamed": responses(echoed, include=[], stream=True),
    "agent-framework": responses(result, by_id=True, store=False, include=["reasoning.encrypted_content"]),
    "codex": responses(
        echoed,
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is 6*7?"}]},
        ],
        stream=True,
        store=False,
        tool_choice="auto",
        parallel_tool_calls=True,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "medium", "summary": "auto"},
        prompt_cache_key="0d1f",
        client_metadata={"session_id": "0d1f"},
        tools=[{"type": "function", **FUNCTION}, {"type": "namespace", "name": "web"}, {"type": "web_search"}],
        headers={"x-codex-turn-metadata": '{"session_id": "0d1f"}', "originator": "codex_exec"},
        ignored=frozenset({"prompt_cache_key", "client_metadata", "reasoning", "tools.namespace", "tools.web_search"}),
    ),
    "anthropic": messages(blocks),
    "pydantic-ai with anthropic": messages(blocks, stream=True, max_tokens=64000, tool_choice={"type": "auto"}),
    "claude code": messages(
        lambda reply: blocks(reply, is_error=False, **CACHED),
        system=billed("a1b"),
        later={"system": billed("f00")},
        stream=True,
        thinking={"type": "enabled", "budget_tokens": 31999},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": '{"session_id": "0d1f"}'},
        temperature=1,
        headers=CLAUDE_CODE,
        ignored=frozenset({"thinking", "context_management", "metadata"}),
    ),
}

# -- reading replies as clients do -----------------------------------------------------------------------------------


def events(text: str) -> list[JSON]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def put_together(path: str, reply: Any) -> JSON:
    """The message of a chat completion, or the whole response or message."""
    if reply.headers["content-type"].startswith("application/json"):
        body = reply.json()
        return body["choices"][0]["message"] if path == "/v1/chat/completions" else body
    found = events(reply.text)
    if path == "/v1/responses":
        return found[-1]["response"]
    return _message(found) if path == "/v1/messages" else _chunks(found)


def _chunks(found: list[JSON]) -> JSON:
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert all({"index", "id", "type"} <= call.keys() for call in calls)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return {"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas), "tool_calls": calls}


def _message(found: list[JSON]) -> JSON:
    content: list[JSON] = []
    for event in found:
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            content[-1]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            content[-1]["input"] = json.loads(event["delta"]["partial_json"])
    return found[0]["message"] | {"content": content}


async def post(service, path, body, headers=None):
    client = await service.http()
    return await client.post(service.environment["ANTHROPIC_BASE_URL"] + path, json=body, headers=headers)


@pytest.mark.parametrize("client", REPLAYS)
async def test_two_turns_with_a_tool_are_served_and_the_second_goes_on_in_the_tokens_of_the_first(serve, client):
    replay = REPLAYS[client]
    service = await serve([CALL, "It is 42."])
    first = await post(service, replay.path, replay.first, replay.headers)
    assert first.status_code == 200, first.text
    told = put_together(replay.path, first)
    second = await post(service, replay.path, replay.second(told), replay.headers)
    assert second.status_code == 200, second.text
    assert "It is 42." in json.dumps(put_together(replay.path, second))
    one, two = [span.attributes for span in await service.spans()]
    known = one[names.PROMPT_TOKEN_IDS] + one[names.RESPONSE_TOKEN_IDS]
    assert (two[names.PROMPT_TOKEN_IDS][: len(known)] == known) == replay.continues
    assert (two.get(names.CONTINUES) is not None, two.get(names.DRIFT, False)) == (
        replay.continues,
        not replay.continues,
    )
    dialect = DIALECTS[replay.path.partition("?")[0].removeprefix("/v1/")]
    lookup = ResponseLookup(service.gateway.responses, (service.rollout_id, service.attempt_id))
    requests = [dialect.read(body, lookup) for body in (replay.first, replay.second(told))]
    assert {name for request in requests for name in request.ignored_fields} == replay.ignored


# -- what a reply must have ------------------------------------------------------------------------------------------

CHAT_BODY = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": FUNCTION}],
}


async def test_a_chat_completion_has_all_that_any_framework_needs(serve):
    service = await serve([CALL])
    reply = (await post(service, "/v1/chat/completions", CHAT_BODY)).json()
    assert reply["id"].startswith("chatcmpl-")
    assert (reply["object"], reply["model"], type(reply["created"])) == ("chat.completion", "scripted", int)
    assert set(reply["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    (choice,) = reply["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "tool_calls")
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], bool(call["id"]), call["function"]["name"]) == ("function", True, "calculator")
    assert json.loads(call["function"]["arguments"]) == {"expression": "6*7"}


async def test_every_chunk_has_its_head_and_usage_comes_without_being_asked_for(serve):
    service = await serve([CALL])
    reply = await post(service, "/v1/chat/completions", CHAT_BODY | {"stream": True})
    assert reply.text.endswith("data: [DONE]\n\n")
    found = events(reply.text)
    assert len({(chunk["id"], chunk["model"], chunk["created"], chunk["object"]) for chunk in found}) == 1
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert found[-1]["usage"]["completion_tokens"] > 0


async def test_a_message_counts_what_it_used_from_its_first_event_on(serve):
    service = await serve(["Hello."])
    body = {"model": "scripted", "max_tokens": 99, "messages": CHAT_BODY["messages"], "stream": True}
    found = events((await post(service, "/v1/messages?beta=true", body)).text)
    assert found[0]["message"]["usage"]["input_tokens"] == len(service.engine.calls[0][0])
    assert found[-2]["usage"]["output_tokens"] == len("Hello.") + 1


async def test_a_response_comes_in_the_events_that_clients_wait_for(serve):
    service = await serve([CALL])
    body = {"model": "scripted", "input": "hi", "tools": [{"type": "function", **STRICT}], "stream": True}
    kinds = [event["type"] for event in events((await post(service, "/v1/responses", body)).text)]
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]


@pytest.mark.parametrize("streams", [False, True])
async def test_arguments_that_are_no_object_reach_the_client_as_they_were_written(serve, streams):
    service = await serve(['<tool_call>\n{"name": "calculator", "arguments": "6*"}\n</tool_call>'])
    message = put_together(
        "/v1/chat/completions", await post(service, "/v1/chat/completions", CHAT_BODY | {"stream": streams})
    )
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["6*"]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_cannot_be_read_reaches_the_client_as_text(serve, streams):
    broken = '<tool_call>\n{"name": "calculator", "arguments": {"expression": 6*7}}\n</tool_call>'
    service = await serve([broken])
    message = put_together(
        "/v1/chat/completions", await post(service, "/v1/chat/completions", CHAT_BODY | {"stream": streams})
    )
    assert (message["content"], message.get("tool_calls") or []) == (broken, [])


# -- what clients try first, and what they take a refusal for --------------------------------------------------------


async def test_a_thread_is_refused_in_the_words_that_have_the_sdk_send_everything(serve):
    service = await serve([])
    body = {"model": "scripted", "max_tokens": 9, "messages": CHAT_BODY["messages"]}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        reply = await post(service, "/v1/messages", body | {"thread": thread})
        assert reply.status_code == 400
        assert reply.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_codex_learns_at_once_that_it_cannot_have_a_websocket(serve, caplog):
    """Other refusals than 426 it takes for a bad connection, and tries again for seconds."""
    service = await serve([])
    client = await service.http()
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        "sec-websocket-version": "13",
    }
    reply = await client.get(f"{service.base_url}/responses", headers=upgrade)
    assert (reply.status_code, reply.json()["error"]["type"]) == (426, "invalid_request_error")
    assert caplog.text == ""
    reply = await client.post(f"{service.base_url}/analytics/codex/turn-costs", json={})
    assert reply.status_code == 404


async def test_claude_code_looks_at_the_base_url_first(serve):
    service = await serve([])
    client = await service.http()
    for method in ("HEAD", "GET"):
        assert (await client.request(method, service.environment["ANTHROPIC_BASE_URL"])).status_code == 200
        assert (await client.request(method, service.environment["ANTHROPIC_BASE_URL"] + "/")).status_code == 200


IMAGES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
        ]
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png,"}]}]
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "image", "source": {"type": "base64", "data": ""}}],
                    }
                ],
            }
        ],
    },
}


@pytest.mark.parametrize("path", IMAGES)
async def test_an_image_is_refused_by_name_where_the_model_reads_text(serve, path):
    service = await serve([])
    reply = await post(service, path, {"model": "scripted"} | IMAGES[path])
    assert reply.status_code == 400
    assert "image" in reply.json()["error"]["message"]
    assert "reads text" in reply.json()["error"]["message"]
    assert service.engine.calls == []


# -- requests that are sent again ------------------------------------------------------------------------------------


async def heard(service):
    return [call.span_id for call in calls(await service.spans())]


async def test_a_request_that_the_sdk_sends_again_says_so_on_its_span(serve):
    service = await serve([PolicyError("the device is lost"), "Hello."])
    client = (await service.client()).with_options(max_retries=1)
    await client.chat.completions.create(model="scripted", messages=CHAT_BODY["messages"])
    failed, answered = await service.spans()
    assert failed.attributes[names.REQUEST] == answered.attributes[names.REQUEST]
    assert (names.RETRIES in failed.attributes, answered.attributes[names.RETRIES]) == (False, 1)
    assert await heard(service) == [answered.span_id]


async def test_of_an_answer_that_was_lost_and_the_one_that_was_heard_only_the_latter_counts(serve):
    service = await serve(["Lost.", "Heard.", "Another."])
    for retries in (0, 1, 0):
        await post(service, "/v1/chat/completions", CHAT_BODY, {"x-stainless-retry-count": str(retries)})
    _, answer, another = await service.spans()
    assert await heard(service) == [answer.span_id, another.span_id]


async def test_what_claude_code_sends_twice_within_a_session_is_one_request(serve):
    service = await serve(["Lost.", "Heard.", "A subagent's."])
    body = {"model": "scripted", "max_tokens": 9, "messages": CHAT_BODY["messages"]}
    for more in ({}, {}, {"x-claude-code-agent-id": "1"}):
        await post(service, "/v1/messages", body, CLAUDE_CODE | more)
    assert await heard(service) == [span.span_id for span in (await service.spans())[1:]]


async def test_asking_the_same_several_times_is_no_repeat(serve):
    service = await serve(["One.", "Two.", "Three."])
    for retries in ("0", "0", "1"):
        await post(service, "/v1/chat/completions", CHAT_BODY, {"x-stainless-retry-count": retries})
    assert len(await heard(service)) == 3


@pytest.mark.parametrize("odd", ["", "-1", "x", "1" * 30, "²"])
async def test_a_count_of_retries_that_is_none_changes_nothing(serve, odd):
    service = await serve(["Hello."])
    await post(service, "/v1/chat/completions", CHAT_BODY, {"x-stainless-retry-count": odd.encode()})
    assert names.RETRIES not in (await service.spans())[0].attributes
