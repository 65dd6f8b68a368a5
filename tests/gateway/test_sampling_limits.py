"""Values that give no distribution, and tokens that no vocabulary has, are a 400 in the dialect of the caller."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from agentlightning.gateway.dialects.chat import CHAT, COMPLETIONS
from agentlightning.gateway.dialects.messages import MESSAGES
from agentlightning.gateway.dialects.responses import RESPONSES
from agentlightning.gateway.errors import ApiError

pytestmark = pytest.mark.integration

MESSAGE = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGE},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "messages": {"messages": MESSAGE, "max_tokens": 4},
}
DIALECTS = {"chat": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
READERS = {name: partial(dialect.read, recall=lambda _: None) for name, dialect in DIALECTS.items()}
SHARED: tuple[tuple[str, Any], ...] = (
    ("temperature", -0.1),
    ("temperature", 101),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", 2**63),
    ("top_k", -2),
    ("top_k", 1.5),
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("max_tokens", 2**70),
)
OPENAI: tuple[tuple[str, Any], ...] = (
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e300),
    ("min_p", 1.1),
    ("min_p", float("nan")),
    ("presence_penalty", 2.1),
    ("frequency_penalty", float("-inf")),
    ("min_tokens", 2**31),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("logit_bias", {"5": float("inf")}),
    ("logit_bias", {"5": -101}),
    ("logit_bias", {"-5": 1}),
)
CASES = [
    *((dialect, name, value) for dialect in BODIES for name, value in SHARED),
    *((dialect, name, value) for dialect in BODIES if dialect != "messages" for name, value in OPENAI),
    *((dialect, "n", value) for dialect in ("chat", "completions") for value in (0, 129, 2**70, 1.5, True)),
]


@pytest.mark.parametrize(("dialect", "name", "value"), CASES)
def test_a_value_out_of_range_is_refused_by_name(dialect: str, name: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        READERS[dialect](BODIES[dialect] | {"model": "policy", name: value})
    assert (refused.value.status, refused.value.param) == (400, name)


PROMPTS = ("[-1]", "[100000]", "[2147483648]", f"[{2**70}]", "[true]", "[5, 1.5]", "[[5], [-1]]")


async def test_ids_of_no_token_are_a_400(serve_tiny: Any) -> None:
    service = await serve_tiny()
    http, url = await service.http(), f"{service.server.url}/v1"
    headers = {"content-type": "application/json", "authorization": f"Bearer {service.key}"}

    async def refused(path: str, body: str | dict[str, Any]) -> dict[str, Any]:
        text = body if isinstance(body, str) else json.dumps({"model": "scripted", "max_tokens": 1, **body})
        response = await http.post(url + path, content=text, headers=headers)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    for tokens in PROMPTS:
        error = await refused("/completions", f'{{"model": "scripted", "max_tokens": 1, "prompt": {tokens}}}')
        assert error["param"] == "prompt", tokens
    for field in ({"logit_bias": {"100000": 1}}, {"stop_token_ids": [100000]}, {"stop_token_ids": [-1]}):
        for path, body in (("/chat/completions", BODIES["chat"]), ("/completions", BODIES["completions"])):
            assert next(iter(field)) in (await refused(path, body | field))["message"]
    good = await http.post(
        f"{url}/completions", json={"model": "scripted", "max_tokens": 1, "prompt": [5, 6]}, headers=headers
    )
    assert good.status_code == 200, good.text
