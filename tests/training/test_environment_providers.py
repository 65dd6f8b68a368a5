"""Promises of runs that train no model: the providers of the environment answer, and their calls are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.threads import in_thread

import agentlightning as agl
from agentlightning.config import TrainConfig
from agentlightning.training.environment_providers import with_own_providers

pytestmark = pytest.mark.integration

AGENT = """
import json, os, urllib.request

def solve(task):
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": task["q"]}]}
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return float("Hello" in answer.read().decode())
"""


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedProvider]:
    """A model server that the environment names, and an agent file that calls it."""
    monkeypatch.chdir(tmp_path)
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    Path("agent.py").write_text(AGENT)
    made = ScriptedProvider(lambda seen: Reply(chat_answer("Hello.")))
    with in_thread(lambda: made):
        monkeypatch.setenv("OPENAI_BASE_URL", made.url + "/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-the-users-own")
        yield made


def test_the_calls_of_an_agent_are_recorded_and_reach_its_provider_with_its_key(provider: ScriptedProvider) -> None:
    agl.Trainer(n_runners=1, run_dir="run").dev("agent.py:solve", [{"q": "a"}, {"q": "b"}])
    assert {seen.headers["authorization"] for seen in provider.seen} == {"Bearer sk-the-users-own"}

    async def spans() -> list[agl.Span]:
        store = agl.LightningStore("run/store.db")
        found = await store.query_rollouts()
        every = [span for each in found for span in await store.query_spans(each.rollout_id)]
        await store.close()
        return every

    recorded = [span for span in asyncio.run(spans()) if span.attributes.get("gen_ai.operation.name") == "chat"]
    assert len(recorded) == len(provider.seen) >= 4
    assert "sk-the-users-own" not in Path("run/config.toml").read_text()


def test_the_dry_run_has_a_line_on_calls(provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"type": "apo", "critic": {"model": "gpt-x"}}
    config = TrainConfig(algorithm=settings, prompts={"p": "Say hello."})  # pyright: ignore
    tasks = [{"q": str(number)} for number in range(24)]
    found = agl.Trainer(config, run_dir="run").dry_run("agent.py:solve", tasks)
    [line] = [check for check in found.checks if check.name == "calls"]
    assert (line.outcome, "8 calls of models were recorded, in 8 of 8" in line.text) == ("ok", True)


def test_what_the_settings_name_is_left_alone(provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    own = TrainConfig(gateway={"providers": [{"name": "mine", "base_urls": ["http://h/v1"]}]})  # pyright: ignore
    assert with_own_providers(own, said.append) is own
    assert said == []
    found = with_own_providers(TrainConfig(), said.append)
    assert [each.name for each in found.gateway.providers] == ["openai"]
    assert said[0].startswith("calls of the agent are recorded and go to openai at http://127.0.0.1")
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert with_own_providers(TrainConfig(), said.append).gateway.providers == ()
