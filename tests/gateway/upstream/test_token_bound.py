"""Promises of the estimate: text by its bytes, images by their number, and nothing lower than it can be."""

import base64
import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import Reply, ScriptedProvider, chat_answer

from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.upstream.limits import estimate_prompt_tokens, max_prompt_tokens

DATA = base64.b64encode(bytes(range(256)) * 4000).decode()
URL = f"data:image/png;base64,{DATA}"
IMAGES = [
    {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
    {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
    {"type": "image_url", "image_url": URL},
    {"type": "input_image", "image_url": URL},
    {"type": "input_image", "file_id": "file-1"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
    {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}},
    {"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": DATA}}]},
    {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": URL}},
]


def body(*parts, **more):
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], **more}).encode()


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("times", [1, 3])
def test_an_image_counts_as_one_however_it_is_sent_and_however_large(image, times):
    text = "what is this?" * 10
    found = max_prompt_tokens(body({"type": "text", "text": text}, *[image] * times), 1000)
    assert times * 1000 + len(text) // 2 <= found < times * 1000 + 1000


@settings(max_examples=30)
@given(st.text(), st.lists(st.sampled_from(["image", "input_audio", '"image"', "{", "base64,"])))
def test_text_counts_by_its_bytes_whatever_it_speaks_of(text, words):
    asked = body({"type": "text", "text": text + "".join(words)}, tools=[{"type": "image"}, {"image": 1}])
    assert max_prompt_tokens(asked, 1000) == len(asked) // 2
    assert max_prompt_tokens(b"image" + asked, 1000) == (len(asked) + 5) // 2


WORD = st.sampled_from([None, 7, "", "image", "image_url", "input_audio", "tool_use", "data:x", ["image"]])
PART = st.dictionaries(st.sampled_from(["type", "source", "data", "image_url", "input_audio", "input", "text"]), WORD)
NESTED = PART | st.dictionaries(st.sampled_from(["type", "source", "image_url", "content"]), WORD | PART)
JSON = WORD | NESTED | st.lists(WORD | NESTED, max_size=2)


@settings(max_examples=20)
@given(st.dictionaries(st.sampled_from(["messages", "system", "tools", "image"]), JSON))
def test_whatever_a_request_holds_there_is_an_estimate(asked):
    assert max_prompt_tokens(json.dumps(asked).encode(), 1000) >= 0
    assert estimate_prompt_tokens(asked) >= 0


def test_an_image_that_is_pasted_as_text_is_text():
    asked = body({"type": "text", "text": URL})
    assert max_prompt_tokens(asked, 1000) == len(asked) // 2


def test_sound_counts_by_its_length_and_a_file_as_text():
    sound = body({"type": "input_audio", "input_audio": {"data": DATA, "format": "mp3"}})
    assert len(DATA) / 32 <= max_prompt_tokens(sound, 1000) < len(DATA) / 32 + 100
    file = body({"type": "file", "file": {"file_data": f"data:application/pdf;base64,{DATA}"}})
    assert max_prompt_tokens(file, 1000) == len(file) // 2


async def test_a_budget_lets_a_call_with_an_image_through_and_stops_one_with_too_many(serve):
    them = {"name": "them", "price": {"input": 1.0}, "image_tokens": 2000, "max_output_tokens": 10}
    async with ScriptedProvider(lambda seen: Reply(chat_answer("A cat.", usage=(900, 5)))) as provider:
        config = {
            "providers": [them | {"base_urls": [f"{provider.url}/v1"]}],
            "routes": [{"model": "theirs", "provider": "them"}],
            "budget": {"rollout_tokens": 10_000},
        }
        service = await serve([], config=GatewayConfig.model_validate(config))
        client = await service.client()

        async def ask(images):
            content = [{"type": "text", "text": "?"}, *[IMAGES[0]] * images]
            return await client.chat.completions.create(model="theirs", messages=[{"role": "user", "content": content}])

        assert (await ask(1)).choices[0].message.content == "A cat."
        with pytest.raises(openai.APIStatusError, match="may use 10203"):
            await ask(5)
        assert service.gateway.budgets.spent(service.rollout_id).tokens == 905
