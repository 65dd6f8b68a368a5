"""What a provider's refusal says, however it is written."""

import gzip
import math
import zlib

import anthropic
import openai
import orjson
import pytest
from tests.support.provider import Reply

from agentlightning import span as names
from agentlightning.gateway.upstream.call import retry_after

HI = [{"role": "user", "content": "hi"}]
KEY = "sk-theirs-0123456789"
TEXT = "The maximum context length is 4096 tokens"
SHAPES = {
    "OpenAI": {"error": {"message": TEXT, "type": "invalid_request_error", "param": None, "code": None}},
    "Anthropic": {"type": "error", "error": {"type": "invalid_request_error", "message": TEXT}},
    "a list": [{"error": {"code": 400, "message": TEXT, "status": "INVALID_ARGUMENT"}}],
    "a detail": {"detail": TEXT},
    "details": {"detail": [{"loc": ["body", "messages"], "msg": TEXT, "type": "value_error"}]},
    "a message": {"object": "error", "message": TEXT, "code": 400},
    "an object in the message": {"error": {"message": {"detail": TEXT}}},
    "a text": {"error": TEXT},
    "errors": {"success": False, "errors": [{"code": 7, "message": TEXT}]},
    "another provider's": {"error": {"message": "Provider returned error", "metadata": {"raw": f'{{"m": "{TEXT}"}}'}}},
    "JSON of no shape": {"reason": {"why": TEXT}},
    "a JSON text": TEXT,
    "plain": TEXT.encode(),
    "HTML": f"<html><head><title>400</title><style>p {{}}</style></head><body><p>{TEXT}</p></body></html>".encode(),
}
CODINGS = {"gzip": gzip.compress, "deflate": zlib.compress}


def written(shape):
    return shape if isinstance(shape, bytes) else orjson.dumps(shape)


@pytest.mark.integration
@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize(
    ("shape", "coding"), [*((shape, None) for shape in SHAPES), *zip(SHAPES, CODINGS, strict=False)]
)
async def test_the_text_of_an_error_reaches_an_agent_that_shortens_its_prompt_by_it(shape, coding, status, ask):
    body = written(SHAPES[shape])
    reply = Reply(CODINGS[coding](body), status, {"content-encoding": coding}) if coding else Reply(body, status)
    service, _ = await ask("openai", lambda seen: reply, retries=0)
    client = await service.client()
    with pytest.raises(openai.APIStatusError, match=TEXT) as caught:
        await client.chat.completions.create(model="theirs", messages=HI)
    assert caught.value.status_code == status
    assert "<" not in caught.value.body["message"]
    other = await service.anthropic()
    with pytest.raises(anthropic.APIStatusError, match=TEXT) as translated:
        await other.messages.create(model="theirs", max_tokens=9, messages=HI)
    if status == 400:
        assert caught.value.code == "context_length_exceeded"
        assert translated.value.body["error"]["message"].startswith("prompt is too long")
    assert all(TEXT in span.status_message for span in await service.spans())


REFUSED = "rejected the configured API key"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("status", "message", "expected", "shown"),
    [
        (401, f"Incorrect API key provided: {KEY}", 502, f"{REFUSED} (status 401): Incorrect API key provided: ***"),
        (401, "Incorrect API key provided: sk-the*****6789.", 502, "provided: ***"),
        (401, "No auth credentials found", 502, "No auth credentials found"),
        (403, f"The API key {KEY} has expired", 502, f"{REFUSED} (status 403): The API key *** has expired"),
        (403, {"message": "no", "code": "invalid_api_key"}, 502, REFUSED),
        (403, "Country, region, or territory not supported", 403, "territory not supported"),
        (403, "Project does not have access to model `big`", 403, "does not have access to model"),
        (403, "This request was blocked by our content policy", 403, "content policy"),
        (403, "Key limit exceeded: add credits", 403, "add credits"),
        (401, "", 502, f"{REFUSED} (status 401)"),
    ],
)
async def test_only_what_is_about_the_key_refuses_the_key_and_the_text_is_there(status, message, expected, shown, ask):
    error = message if isinstance(message, dict) else {"message": message}
    service, _ = await ask("openai", [Reply({"error": error}, status)], retries=0)
    client = await service.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="theirs", messages=HI)
    assert (caught.value.status_code, shown in str(caught.value)) == (expected, True)
    (span,) = await service.spans()
    assert shown in span.status_message
    assert (span.attributes[names.ERROR_TYPE] == "provider_key_refused") == (expected == 502)
    said = f"{caught.value} {span.status_message} {span.attributes}"
    assert not any(part in said for part in (KEY, "*6789"))


@pytest.mark.integration
async def test_a_key_that_nobody_configured_is_not_called_wrong(ask):
    service, _ = await ask("openai", [Reply({"error": {"message": "no key"}}, 401)], retries=0, api_key=None)
    client = await service.client()
    with pytest.raises(openai.APIStatusError, match="for which no API key is configured"):
        await client.chat.completions.create(model="theirs", messages=HI)


@pytest.mark.integration
async def test_what_all_calls_fail_of_is_logged_a_few_times(ask, caplog):
    replies = [Reply({"error": {"message": text}}, 500) for text in [*["down"] * 12, "other"]]
    service, _ = await ask("openai", replies, retries=0)
    client = await service.client()
    for _ in replies:
        with pytest.raises(openai.APIStatusError):
            await client.with_options(max_retries=0).chat.completions.create(model="theirs", messages=HI)
    said = [each.getMessage() for each in caplog.records if "a call failed" in each.getMessage()]
    assert said == ["a call failed: down", "a call failed (10 times): down", "a call failed: other"]


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        (b"retry-after", b"3", 3.0),
        (b"retry-after-ms", b"250", 0.25),
        (b"retry-after", b"-5", None),
        (b"retry-after", b"soon", None),
        (b"retry-after-ms", b"nan", None),
        (b"retry-after-ms", b"inf", 86_400.0),
        (b"retry-after", b"9" * 400, 86_400.0),
        (b"retry-after", b"Fri, 31 Dec 9999 23:59:59 GMT", 86_400.0),
        (b"retry-after", b"Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
    ],
)
def test_how_long_to_wait_is_a_number_that_can_be_waited_for_or_nothing(name, value, seconds):
    found = retry_after([(b"content-type", b"text/plain"), (name, value)])
    assert found == seconds
    assert found is None or math.ceil(found) >= 0
