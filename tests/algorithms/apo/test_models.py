"""Critic and editor: what they are asked, and what becomes of replies that cannot be used."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import orjson
import pytest
from tests.support.prompt_worlds import START, PromptWorld
from tests.support.provider import Reply, ScriptedProvider, Seen

from agentlightning.algorithms.apo import search
from agentlightning.algorithms.apo.beam import BeamSearch
from agentlightning.algorithms.apo.config import PromptModel
from agentlightning.algorithms.apo.search import MAX_CRITIQUE_CHARS, MAX_SKIPS, ModelError, Outcome, open_model
from agentlightning.errors import ConfigError, TrainingStopped

TEXTS = {"prompt": "Say {word}.", "book": "- Be kind."}
FAILED = [Outcome(0, 0.25, "Task: red\n" + "x" * 500), Outcome(1, None, "Failure: it broke")]
ADVICE = "The prompt lacks the colour."


@pytest.fixture
def writer(made, model):
    """Makes a search with these models."""

    def make(critic=lambda _: ADVICE, editor=lambda _: "{}", **settings):
        search = made(BeamSearch, PromptWorld(), max_edits=2, max_transcript_chars=100, **settings)
        search.models = {"critic": model(critic), "editor": model(editor)}
        return search

    return make


async def test_the_critic_sees_numbered_texts_and_rollouts_cut_in_the_middle(writer):
    asked = writer()
    critique = await asked.critique(TEXTS, FAILED)
    [text] = asked.models["critic"].asked
    assert critique == ADVICE
    assert "## prompt\n[1] Say {word}." in text
    assert "## Rollout 1, reward 0.25" in text
    assert "## Rollout 2, reward none\nFailure: it broke" in text
    assert "characters left out" in text
    assert asked.spending.model_calls == 1
    assert asked.spending.tokens == 5
    assert asked.spending.money == pytest.approx(3.0)


async def test_the_critic_counts_items_of_playbooks(writer):
    asked = writer(lambda _: f"{ADVICE}\nHELPFUL: 1, 3\nHARMFUL: [2]", playbooks=["book"])
    book = {"prompt": "Say {word}.", "book": "- Be kind.\n- Be brief.\n- Be loud."}
    assert await asked.critique(book, FAILED) == ADVICE
    assert "The lines of book are items" in asked.models["critic"].asked[0]
    assert "HELPFUL" in asked.models["critic"].asked[0]
    assert asked.playbook.counts == {"be kind.": [1, 0], "be loud.": [1, 0], "be brief.": [0, 1]}


async def test_the_editor_sees_the_advice_and_the_edits_that_did_not_help(writer):
    asked = writer(playbooks=["book"])
    asked.playbook.counts = {"be kind.": [2, 0]}
    await asked.edit(TEXTS, ADVICE, ["add 'Shout.'"])
    [text] = asked.models["editor"].asked
    assert "at most 2 edits" in text
    assert "- add 'Shout.'" in text
    assert "[1] - Be kind.\nItem [1] helped 2" in text
    assert ADVICE in text


@pytest.mark.parametrize(
    ("reply", "reason"),
    [("", "critic_empty"), ("?!", "critic_nonsense"), ("word " * MAX_CRITIQUE_CHARS, "critic_over_long")],
)
async def test_a_critique_that_cannot_be_used_is_skipped_and_counted(writer, reply, reason):
    asked = writer(lambda _: reply)
    assert await asked.critique(TEXTS, FAILED) is None
    assert asked.skips == {reason: 1}


async def test_too_many_useless_replies_in_a_row_end_the_search(writer):
    asked = writer(lambda _: "")
    for _ in range(MAX_SKIPS - 1):
        await asked.critique(TEXTS, FAILED)
    with pytest.raises(TrainingStopped, match=rf"{MAX_SKIPS} critic_empty.*Use another model"):
        await asked.critique(TEXTS, FAILED)


async def test_a_useful_reply_starts_the_count_again(writer):
    replies = iter([*[""] * (MAX_SKIPS - 1), ADVICE, *[""] * (MAX_SKIPS - 1)])
    asked = writer(lambda _: next(replies))
    for _ in range(2 * MAX_SKIPS - 1):
        await asked.critique(TEXTS, FAILED)


@pytest.mark.parametrize(
    "reply",
    [
        "I would rather talk.",
        "{}",
        '{"edits": [{"op": "replace", "name": "nowhere", "line": 900, "text": "x"}]}',
        '[{"op": "fly"}]',
    ],
)
async def test_useless_edits_end_the_search_although_the_critic_is_of_use(writer, reply):
    search, parent = writer(editor=lambda _: reply), {"prompt": START}

    async def go_on() -> None:
        for _ in range(57):
            await search.critique(TEXTS, FAILED)
            await search.edit(parent, "be clear")

    with pytest.raises(TrainingStopped, match=rf"{MAX_SKIPS} replies of the editor in a row.*the editor said") as ended:
        await go_on()
    assert reply[:20] in str(ended.value)
    assert sum(search.skips.values()) == MAX_SKIPS


# -- endpoints -------------------------------------------------------------------------------------------------------


def chat(text: str, finish: str = "stop") -> dict[str, object]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


async def ask(script, monkeypatch, **settings):
    monkeypatch.setattr(search, "BACKOFF_SECONDS", 0.0)
    async with ScriptedProvider(script) as provider, AsyncExitStack() as stack:
        given = PromptModel(model="m", base_url=f"{provider.url}/v1", **settings)
        opened = await open_model(given, None, stack, "critic")
        try:
            return await opened.complete([{"role": "user", "content": "Hi"}]), provider.seen
        finally:
            ask.seen = provider.seen


async def test_an_endpoint_is_asked_with_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    reply, [seen] = await ask([Reply(orjson.dumps(chat("Hello.")))], monkeypatch, api_key_env="MY_KEY", max_tokens=9)
    assert (reply.text, reply.input_tokens, reply.output_tokens, reply.truncated) == ("Hello.", 7, 3, False)
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == "Bearer secret"
    assert seen.json == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 1.0,
        "max_tokens": 9,
    }


async def test_a_busy_endpoint_is_asked_again(monkeypatch):
    reply, seen = await ask([Reply(status=429), Reply(orjson.dumps(chat("Now.", "length")))], monkeypatch)
    assert reply.truncated
    assert len(seen) == 2


@pytest.mark.parametrize(("status", "named"), [(401, "OPENAI_API_KEY"), (404, "the model 'm' at .* answered 404")])
async def test_a_refused_key_or_model_ends_the_run_in_words(monkeypatch, status, named):
    with pytest.raises(ConfigError, match=named):
        await ask([Reply(status=status)], monkeypatch)


@pytest.mark.parametrize("reply", [Reply(status=500), Reply(b"not JSON"), Reply(b'{"choices": []}')])
async def test_an_endpoint_without_a_reply_is_an_error_that_is_counted(monkeypatch, reply):
    with pytest.raises(ModelError) as error:
        await ask(lambda _: reply, monkeypatch)
    assert error.value.reason == "failed"


async def test_a_reply_that_takes_too_long_is_given_up(monkeypatch):
    def hang(_: Seen) -> Reply:
        return Reply(end="hang", head=False)

    with pytest.raises(ModelError, match=r"no reply within 0\.05 s") as error:
        await ask(hang, monkeypatch, timeout_seconds=0.05)
    assert error.value.reason == "timeout"


async def test_a_model_without_a_name_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.critic names no model"):
        await open_model(PromptModel(), None, AsyncExitStack(), "critic")


class Client:
    """What `openai.AsyncOpenAI` looks like to its callers."""

    def __init__(self, create):
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))


async def test_a_client_object_is_called_as_openai_is():
    asked = {}

    async def create(**request):
        asked.update(request)
        message = SimpleNamespace(content="Yes.")
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")], usage=None)

    settings = PromptModel(model="m", temperature=0.5, max_tokens=9)
    opened = await open_model(settings, Client(create), AsyncExitStack(), "critic")
    assert (await opened.complete([{"role": "user", "content": "Hi"}])).text == "Yes."
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.5, 9)


async def test_errors_of_a_client_are_counted_not_raised(writer):
    async def create(**_):
        raise RuntimeError("quota")

    async def hang(**_):
        await asyncio.sleep(10)

    for call, reason in ((create, "failed"), (hang, "timeout")):
        settings = PromptModel(model="m", timeout_seconds=0.01)
        opened = await open_model(settings, Client(call), AsyncExitStack(), "critic")
        asked = writer()
        asked.models = {"critic": opened}
        assert await asked.critique(TEXTS, FAILED) is None
        assert asked.skips == {f"critic_{reason}": 1}


@pytest.mark.slow
async def test_a_local_model_writes_and_says_when_a_text_is_too_long_for_it(tmp_path):
    from tests.support.models import tiny_checkpoint

    path = tiny_checkpoint(tmp_path / "model")
    async with AsyncExitStack() as stack:
        settings = PromptModel(path=str(path), max_tokens=4)
        opened = await open_model(settings, None, stack, "critic")
        reply = await opened.complete([{"role": "user", "content": "What is 12 + 30?"}])
        assert 0 < reply.output_tokens <= 4
        assert reply.input_tokens > 0
        with pytest.raises(ModelError, match="leaves no room"):
            await opened.complete([{"role": "user", "content": "word " * 500}])
