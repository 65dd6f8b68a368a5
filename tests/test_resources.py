"""What an LLM says of its address, and what resources look like as JSON."""

import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from jinja2 import UndefinedError

from agentlightning.algorithms.apo.text import placeholders
from agentlightning.errors import ConfigError, StoreError
from agentlightning.resources import LLM, NamedResources, PromptTemplate, ProxyLLM, as_resources, named_resources
from agentlightning.rollouts import Attempt, AttemptedRollout
from agentlightning.server.app import Server
from agentlightning.store import LightningStore
from agentlightning.util import templates


@pytest.mark.parametrize("endpoint", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_an_endpoint_may_end_in_v1_or_not(endpoint: str) -> None:
    llm = LLM(endpoint=endpoint, model="m")
    assert llm.base_url == llm.get_base_url() == "http://h:8000/v1"
    assert llm.get_base_url("ro-1", "at-1") == "http://h:8000/rollout/ro-1/attempt/at-1/v1"
    assert llm.endpoint == endpoint


def test_an_endpoint_under_a_path_keeps_it() -> None:
    assert LLM(endpoint="http://h/proxy/v1", model="m").base_url == "http://h/proxy/v1"


def test_a_proxy_gives_an_attempt_an_address_of_its_own() -> None:
    proxy = ProxyLLM(endpoint="http://h:4000/v1", model="m", api_key="k", sampling_parameters={"temperature": 0.5})
    attempt = Attempt("ro-1", "at-1", 1, 0.0)
    llm = proxy.with_attempted_rollout(AttemptedRollout("ro-1", "task", 0.0, attempt=attempt))
    assert type(llm) is LLM
    assert llm.base_url == "http://h:4000/rollout/ro-1/attempt/at-1/v1"
    assert (llm.api_key, llm.sampling_parameters) == ("k", {"temperature": 0.5})


def test_every_kind_of_resource_is_read_back_as_it_was() -> None:
    resources: NamedResources = {
        "llm": LLM(endpoint="http://x", model="m"),
        "proxy": ProxyLLM(endpoint="http://x", model="m"),
        "prompt": PromptTemplate(template="{q}"),
    }
    again = named_resources.validate_json(named_resources.dump_json(resources))
    assert again == resources
    assert {name: type(each) for name, each in again.items()} == {
        "llm": LLM,
        "proxy": ProxyLLM,
        "prompt": PromptTemplate,
    }


@asynccontextmanager
async def opened(path: Path | str) -> AsyncIterator[Any]:
    store = LightningStore(path)
    yield store
    await store.close()


class Task:
    question = "why"


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ('Answer {q} as {"city": "x"}', 'Answer Rome as {"city": "x"}'),
        ('{"a": {"b": {q}}}', '{"a": {"b": Rome}}'),
        ("an empty {} and {q}", "an empty {} and Rome"),
        ("a set {1, 2} { {q:>6}", "a set {1, 2} {   Rome"),
        ("\\boxed{42} of {q}", "\\boxed{42} of Rome"),
        ("{{{q}}} of {{q}}", "{Rome} of {q}"),
    ],
)
def test_braces_that_are_no_placeholder_are_text(template: str, filled: str) -> None:
    prompt = PromptTemplate(template=template)
    assert prompt.format(q="Rome") == filled
    assert placeholders(prompt) == {"q"}


def test_a_missing_value_is_named_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"placeholder \{answer\}, and the values are q; .* as \{\{ and \}\}"):
        PromptTemplate(template="Reply with {answer: 42}").format(q=1)


@pytest.mark.parametrize("engine", ["f-string", "jinja"])
@pytest.mark.parametrize("reach", ["t.__init__.__globals__", "t.__class__", "f.__globals__"])
def test_a_prompt_reads_what_it_is_given_and_nothing_behind_it(engine: Any, reach: str) -> None:
    def function() -> None: ...

    blanks = ("{t.question} {d[a]} {n!r:>3}", "{{t.question}} {{d.a}}   {{n}}")[engine == "jinja"]
    assert PromptTemplate(template=blanks, engine=engine).format(t=Task(), d={"a": 1}, n=2) == "why 1   2"
    blank = "{%s}" if engine == "f-string" else "{{%s}}"
    with pytest.raises(ConfigError, match="unsafe"):
        PromptTemplate(template=blank % reach, engine=engine).format(t=Task(), f=function)
    with pytest.raises((ConfigError, UndefinedError), match="missing"):
        PromptTemplate(template=blank % "missing", engine=engine).format()


CHANGES = [
    "{{ task.update({'answer': ''}) }}",
    "{% set _ = task.words.append('x') %}{{ task.answer }}",
    "{{ task.pop('answer') }}",
    "{{ task.words.clear() }}",
    "{{ task.thing.change() }}",
]


class Thing:
    def __init__(self) -> None:
        self.changed = False

    def change(self) -> None:
        self.changed = True


@pytest.mark.parametrize("template", CHANGES)
def test_a_prompt_changes_nothing_that_the_reward_sees(template: str) -> None:
    thing = Thing()
    task: dict[str, Any] = {"answer": "42", "words": ["a"], "thing": thing}
    with contextlib.suppress(ConfigError):
        PromptTemplate(template=template, engine="jinja").format(task=task)
    assert (task["answer"], task["words"], thing.changed) == ("42", ["a"], False)


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}{% endfor %}",
    "{{ 'x' * 999999999 }}",
    "{{ [0] * 999999999 }}",
    "{{ 9 ** 999999999 }}",
    "{{ 'x'.center(999999999) }}",
    "{% for a in range(90000) %}{{ 'xxxxxxxxxx' * 100 }}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_prompt_that_does_not_end_or_writes_too_much_is_stopped(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    with pytest.raises(ConfigError, match="is not allowed"):
        PromptTemplate(template=template, engine="jinja").format()


def test_values_that_cannot_be_copied_are_named() -> None:
    with pytest.raises(ConfigError, match="cannot be copied"):
        PromptTemplate(template="{{ lock }}", engine="jinja").format(lock=threading.Lock())


async def test_what_could_not_be_read_again_is_not_published() -> None:
    async with opened(":memory:") as store:
        deep: Any = 1
        for _ in range(200):
            deep = {"a": deep}
        with pytest.raises(ConfigError, match="read back"):
            await store.add_resources({"llm": LLM(endpoint="http://x", model="m", sampling_parameters={"deep": deep})})
        assert await store.query_resources() == []


async def test_a_damaged_resource_names_itself_stops_nothing_else_and_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        await store.add_resources({"llm": LLM(endpoint="http://x", model="m")}, "rs-1")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE resources SET body = '{\"llm\": 5}'")
    connection.commit()
    connection.close()
    async with opened(path) as store:
        with pytest.raises(StoreError, match=r"'rs-1'.*update_resources"):
            await store.get_latest_resources()
        async with Server(store, secret="s") as server, httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200
            refused = await client.get("/v1/agl/resources/latest")
            assert (refused.status_code, "'rs-1'" in refused.text) == (500, True)
        await store.update_resources("rs-1", {"llm": LLM(endpoint="http://y", model="m")})
        latest = await store.get_latest_resources()
        assert latest.resources["llm"] == LLM(endpoint="http://y", model="m")
        assert [await store.delete_resources("rs-1") for _ in range(2)] == [1, 0]
        assert await store.get_latest_resources() is None


async def test_a_new_database_is_for_its_owner_alone(tmp_path: Path) -> None:
    async with opened(tmp_path / "new" / "store.db") as store:
        await store.start_rollout("x")
        found = {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "new").glob("store.db*")}
    assert set(found.values()) == {0o600}
    assert "store.db-wal" in found


def test_a_text_is_a_prompt_template() -> None:
    llm, prompt = LLM(endpoint="http://h", model="m"), PromptTemplate(template="Say {word}.")
    found = as_resources({"a": "Say {word}.", "b": prompt, "c": prompt.model_dump(), "d": llm})
    assert found == {**dict.fromkeys("abc", prompt), "d": llm}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"prompt": 5}, "the resource prompt is no text, PromptTemplate or LLM: 5"),
        ({"prompt": {"text": "x"}}, "the resource prompt is no text, PromptTemplate or LLM: {'text': 'x'}"),
        ("Say {word}.", "resources are given by name, as {'prompt': ...}, not as str"),
    ],
)
def test_what_is_no_resource_is_refused_in_one_line(given: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        as_resources(given)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
