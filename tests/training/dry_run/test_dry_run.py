"""A dry run says in words what would keep training from working: real rollouts of agents with one mistake each."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from tests.support.tokenizer import tiny_tokenizer

import agentlightning as agl
from agentlightning.chat.hf import HFChatFormat
from agentlightning.training.dry_run import DryRun, DryRunRollout, check_tool_format, checks_of
from agentlightning.util.progress import Progress

pytest.importorskip("torch")
TASKS = [{"word": f"word {number}"} for number in range(12)]


def ask(word: str, url: str | None = None, **extra: Any) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": f"say {word}"}], "max_tokens": 6, **extra}
    request = urllib.request.Request(
        (url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def length(task: dict, output: str) -> float:
    return float(len(output))


async def good(word: str) -> str:
    return await asyncio.to_thread(ask, word)


async def ignores_the_address(word: str) -> str:
    return f"I know {word} by heart"


async def returns_nothing(word: str) -> None:
    await good(word)


async def raises(word: str) -> str:
    await good(word)
    raise LookupError(f"no such page: {word}")


async def fails_before_it_calls(word: str) -> str:
    raise LookupError(f"no such page: {word}")


async def has_a_broken_tool(word: str) -> str:
    agl.emit_tool_call("search", {"query": word}, error="KeyError: 'API_KEY'")
    return await good(word)


def dry_run(agent: Any, tmp_path: Any, reward: Any = length, **settings: Any) -> DryRun:
    config = agl.TrainConfig(
        runner=agl.config.RunnerConfig(concurrency=8, timeout_seconds=20), policy={"model": "tiny"}
    )
    trainer = agl.Trainer(config, reward=reward, run_dir=tmp_path / "run", progress=Progress(enabled=False))
    found = trainer.dry_run(agent, TASKS)
    assert not (tmp_path / "run").exists(), "a dry run leaves nothing"
    return found


@pytest.mark.slow
def test_its_rollouts_are_those_of_the_policy_after_its_warm_start(tmp_path):
    shown = [
        {"messages": [{"role": "user", "content": f"say word {n}"}, {"role": "assistant", "content": "yes"}]}
        for n in range(64)
    ]
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in shown))
    optimizer = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3}
    warm_start = {"dataset": str(tmp_path / "demonstrations.jsonl"), "steps": 24, "batch_size": 16}
    config = agl.TrainConfig(
        runner=agl.config.RunnerConfig(concurrency=8, timeout_seconds=20),
        policy={"model": "tiny"},
        warm_start={**warm_start, "optimizer": optimizer},
    )
    progress = Progress(enabled=False)
    trainer = agl.Trainer(config, reward=says_yes, run_dir=tmp_path / "run", progress=progress)
    found = trainer.dry_run(good, TASKS)
    model = check(found, "model")
    assert (model.outcome, model.text) == ("ok", "tiny answers after its warm start")
    assert sum(each.reward or 0.0 for each in found.rollouts) >= 6


def says_yes(task: dict, output: str) -> float:
    return float(output.strip() == "yes")


def check(found: DryRun, name: str) -> Any:
    (only,) = (each for each in found.checks if each.name == name)
    return only


@pytest.mark.slow
def test_an_agent_that_works_is_ready(tmp_path):
    found = dry_run(good, tmp_path)
    assert found.is_ready
    assert {each.name: each.outcome for each in found.checks if each.outcome == "ok"} == dict.fromkeys(
        ("agent", "rollouts", "calls", "tokens", "reward"), "ok"
    )
    assert check(found, "model").outcome == check(found, "tasks").outcome == "warning", "random weights, few tasks"
    assert all(each.sampled_tokens == 6 and each.reward is not None for each in found.rollouts)
    assert len(found.as_json()["rollouts"]) == 8


@pytest.mark.slow
def test_an_agent_that_ignores_the_address_is_told_what_to_look_for(tmp_path):
    found = dry_run(ignores_the_address, tmp_path)
    assert not found.is_ready
    assert check(found, "calls").text == "the agent made no call to the model that is to learn"
    assert "base_url=" in check(found, "calls").advice
    assert "OPENAI_BASE_URL" in check(found, "calls").advice


@pytest.mark.slow
def test_a_missing_reward_is_named(tmp_path):
    found = dry_run(returns_nothing, tmp_path, reward=None)
    assert check(found, "reward").outcome == "failed"
    assert check(found, "reward").text.startswith("8 of 8 rollouts have none")


@pytest.mark.slow
def test_a_reward_that_is_always_the_same_is_shown_with_an_output(tmp_path):
    found = dry_run(good, tmp_path, reward=lambda task, output: 0.0)
    assert found.is_ready, "it may be the tasks"
    assert check(found, "reward").outcome == "warning"
    assert "all 8 rewards are 0: rollouts that do not differ teach nothing" in check(found, "reward").text
    assert "'word 0'" in check(found, "reward").text or "{'word'" in check(found, "reward").text


@pytest.mark.slow
def test_an_agent_that_raises_is_shown_with_its_traceback_and_task(tmp_path):
    found = dry_run(raises, tmp_path)
    assert check(found, "rollouts").outcome == "failed"
    assert "8 of 8 failed" in check(found, "rollouts").text
    assert "LookupError: no such page: word" in check(found, "rollouts").text
    assert check(found, "calls").outcome == "ok", "its calls arrived all the same"


@pytest.mark.slow
def test_an_agent_that_fails_before_it_calls_the_model_is_told_of_its_error_first(tmp_path):
    found = dry_run(fails_before_it_calls, tmp_path)
    assert check(found, "calls").text == "the agent made no call to the model that is to learn before it failed"
    assert check(found, "calls").advice.startswith("see the error above first. Or: it ignores the address")


@pytest.mark.slow
def test_a_tool_that_raises_is_named(tmp_path):
    found = dry_run(has_a_broken_tool, tmp_path)
    assert "tools raised: search 8 times" in check(found, "tools").text
    assert "API_KEY" in check(found, "tools").text


@pytest.mark.slow
def test_an_agent_that_cannot_be_imported_is_one_finding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    found = dry_run("broken.py:solve", tmp_path)
    assert not found.is_ready
    assert "no_such_package" in check(found, "agent").text


@pytest.mark.parametrize(("setting", "texts"), [(None, 1), ("messages", 1), ("template", 0), ("hermes", 1)])
def test_where_tools_stand_is_said_if_the_template_has_no_place_for_them(setting, texts):
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    found = check_tool_format(HFChatFormat(tiny_tokenizer(template), tool_calls=setting))
    assert [each.text for each in found if "in Hermes' format" in each.text] == [each.text for each in found]
    assert len(found) == texts
    assert not check_tool_format(HFChatFormat(tiny_tokenizer()))


STOPPED = DryRunRollout("r1", {"word": "a"}, "timeout", 20.0, failure="did not end within 20 s")
ANSWERED = DryRunRollout(
    "r2", {"word": "b"}, "succeeded", 1.0, "b", 0.0, policy_calls=1, sampled_tokens=6, offered_tools=("stock",)
)


def advice_of(*rollouts: DryRunRollout, random_weights: bool = False) -> dict[str, str]:
    found = checks_of(rollouts, trains=True, random_weights=random_weights)
    return {each.name: f"{each.text}. {each.advice}" for each in found if each.outcome != "ok"}


def test_an_agent_that_waits_for_a_long_answer_until_its_time_is_over_is_told_of_max_tokens():
    some = advice_of(STOPPED, ANSWERED, ANSWERED)
    assert "without max_tokens" in some["rollouts"]
    assert "; 1 rollouts were stopped before an answer. without max_tokens" in some["calls"]
    assert "made none" not in some["calls"]
    assert "without max_tokens" in advice_of(STOPPED, STOPPED)["calls"]
    silent = advice_of(replace(ANSWERED, policy_calls=0), ANSWERED)["calls"]
    assert "; 1 rollouts made none" in silent
    assert "max_tokens" not in silent


def test_tools_that_are_offered_and_never_called_are_named():
    assert "the model is offered stock, and no answer calls a tool" in advice_of(ANSWERED)["tools"]
    call = {"type": "tool_call", "id": "1", "name": "stock", "arguments": {}}
    assert "tools" not in advice_of(ANSWERED, replace(ANSWERED, transcript=({"role": "assistant", "parts": [call]},)))
    assert "tools" not in advice_of(replace(ANSWERED, offered_tools=()))
    assert "tools" not in advice_of(ANSWERED, random_weights=True), "its answers are noise"


@pytest.mark.slow
def test_the_tools_that_an_agent_offers_are_seen_in_its_calls(tmp_path):
    found = dry_run(offers_a_tool, tmp_path)
    assert {each.offered_tools for each in found.rollouts} == {("stock",)}


async def offers_a_tool(word: str) -> str:
    tool = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object", "properties": {}}}}
    return await asyncio.to_thread(ask, word, tools=[tool])


@pytest.mark.slow
def test_an_agent_without_a_value_for_a_parameter_is_not_sent_to_look_for_addresses(tmp_path):
    calls = check(dry_run(needs_a_key, tmp_path), "calls")
    assert calls.advice == "mend the error above"


async def needs_a_key(task: dict, missing: str) -> str:
    return await good(missing)
