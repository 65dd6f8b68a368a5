"""What a provider says of its own key: it reaches neither agents nor spans, wherever it stands."""

import json

import orjson
import pytest
from pydantic import SecretStr
from tests.support.provider import Reply, chat_answer
from tests.support.provider_streams import (
    chat_events,
    messages_answer,
    messages_events,
    response_answer,
    response_events,
)

from agentlightning.gateway.config import Provider
from agentlightning.gateway.upstream.call import Redactor

KEY = "sk-theirs-0123456789"
BASIC = "user:a password/of 20 letters"
HEADERS = {"x-gateway-token": "Token tok-abcdef-0123456789", "x-project": "project-7"}
LEAKING = {
    "x-request-id": f"req-{KEY}",
    "x-ratelimit-limit-requests": HEADERS["x-gateway-token"],
    "openai-version": "tok-abcdef-0123456789",
}
ERROR = {"message": f"bad key {KEY}", "type": "x", "code": f"code-{KEY}", "param": f"tok-abcdef-0123456789 {KEY}"}
TEXT = f"You sent {KEY}."
ITEM = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": TEXT}]}
PATHS = ("chat/completions", "messages", "responses")
WHOLE = {
    "chat/completions": chat_answer(TEXT),
    "messages": messages_answer([{"type": "text", "text": TEXT}]),
    "responses": response_answer([ITEM]),
}
STREAMS = {
    "chat/completions": [*chat_events(["Hel"])[:2], b"data: " + orjson.dumps({"error": ERROR}) + b"\n\n"],
    "messages": [
        *messages_events([{"type": "text", "text": "Hello"}])[:3],
        b"event: error\ndata: " + orjson.dumps({"type": "error", "error": ERROR}) + b"\n\n",
    ],
    "responses": [
        *response_events([ITEM | {"content": [{"type": "output_text", "text": "Hi."}]}])[:3],
        b"event: error\ndata: " + orjson.dumps({"type": "error", **ERROR, "error": ERROR}) + b"\n\n",
    ],
}


def leaks(path, seen):
    """An echo in a whole answer and in a stream, and errors of each kind."""
    asked = seen.json
    if asked.get("stream"):
        return Reply(events=STREAMS[path], headers=LEAKING)
    said = json.dumps(asked)
    status = next((status for status in (400, 429) if f"say {status}" in said), None)
    if status is None:
        return Reply(WHOLE[path], headers=LEAKING)
    return Reply({"error": ERROR}, status=status, headers=LEAKING)


def asks(path, say, stream):
    said = {"model": "theirs", "stream": stream, "max_tokens": 9, "messages": [{"role": "user", "content": say}]}
    return {"model": "theirs", "stream": stream, "input": say} if path == "responses" else said


@pytest.mark.parametrize("speaks", PATHS)
async def test_nothing_an_agent_or_a_span_sees_holds_a_key_of_a_provider(ask, speaks):
    options = {"headers": HEADERS, "paths": [speaks], "retries": 0}
    service, provider = await ask(
        "anthropic" if speaks == "messages" else "openai", lambda seen: leaks(speaks, seen), **options
    )
    http, seen = await service.http(), list[str]()
    for path in PATHS:
        for say in ("hi", "say 400", "say 429"):
            for stream in (False, True):
                url, key = f"{service.base_url}/{path}", {"authorization": f"Bearer {service.key}"}
                reply = await http.post(url, json=asks(path, say, stream), headers=key)
                seen += [f"{path} {say} {reply.status_code}", repr(reply.headers.raw), reply.text]
    seen.append(json.dumps([(span.status_message, span.attributes) for span in await service.spans()]))
    everything = "\n".join(seen)
    assert len(provider.seen) == 18
    assert "***" in everything
    for secret in (KEY, "tok-abcdef-0123456789"):
        assert secret not in everything


def test_a_credential_is_found_however_it_is_written_and_words_are_left_alone():
    basic = {"authorization": "Basic dXNlcjphIHBhc3N3b3JkL29mIDIwIGxldHRlcnM=", "http-referer": "https://my.app/x"}
    provider = Provider(
        name="them", base_urls=("http://h/v1",), headers=basic, api_key=SecretStr('sk/"quoted"/0123456789')
    )
    redactor, key, password = Redactor(provider), 'sk/"quoted"/0123456789', "a password/of 20 letters"
    bodies = [json.dumps(key), json.dumps(password).replace("/", "\\/"), "a%20password%2Fof%2020%20letters"]
    for body in bodies:
        assert b"***" in redactor.redact_body(f'{{"text": "{body}"}}'.encode())
    said = b'{"text": "see https://my.app/x", "error": null}'
    assert redactor.redact_body(said) == said
    assert b"https://my.app/x" not in redactor.redact_body(b'{"error": {"message": "https://my.app/x"}}')


def test_an_error_is_one_whatever_else_is_none():
    redactor = Redactor(Provider(name="them", base_urls=("http://h/v1",), headers={"x-project": "project-7"}))
    said = {"choices": [{"error": None}], "error": {"message": "no project-7"}}
    for data in (json.dumps(said).encode(), orjson.dumps(said)):
        assert b"project-7" not in redactor.redact_body(data)
    whole = orjson.dumps({"choices": [{"content": "project-7"}], "error": None})
    assert redactor.redact_body(whole) == whole


def test_an_errors_text_may_hold_a_secret_as_json_has_it():
    key = 'a "quoted" key/of 25 lett'
    provider = Provider(name="them", base_urls=("http://h/v1",), api_key=SecretStr(key))
    assert Redactor(provider).text(f"refused: {json.dumps({'key': key})}") == 'refused: {"key": "***"}'
