"""`reasoning_gym:NAME`: seeded tasks, disjoint parts, exact scores, and errors that say what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentlightning.config import TrainConfig
from agentlightning.errors import AgentError, ConfigError, DatasetError, MissingExtraError, RewardError
from agentlightning.integrations import reasoning_gym as gym
from agentlightning.integrations.base import Address, chat
from agentlightning.runner.agents.agent import function_spec
from agentlightning.task import load_dataset
from agentlightning.training.persistence.run_dir import load_tasks
from agentlightning.util.settings import load_settings


class FakeGenerator:
    """Sums of two digits: 100 questions, of which an index and a seed choose one."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = (self.seed + index * 37) % 100
        return {
            "question": f"{number // 10} + {number % 10}",
            "answer": str(number // 10 + number % 10),
            "metadata": {},
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "_generator", lambda name, seed, options: FakeGenerator(seed))


def questions(address: str) -> list[str]:
    return [task["question"] for task in load_dataset(address)]


# -- addresses -------------------------------------------------------------------------------------------------------


def test_an_address_has_a_size_a_seed_and_the_options_of_its_environment() -> None:
    found = Address.parse("reasoning_gym:chain_sum?size=20&seed=3&max_terms=4&style=plain&flag=true")
    assert (found.kind, found.name, found.size, found.seed, found.part) == ("reasoning_gym", "chain_sum", 20, 3, None)
    assert found.options == {"max_terms": 4, "style": "plain", "flag": True}


@pytest.mark.parametrize(
    "bad", ["reasoning_gym:", ":name", "a:b?size=0", "a:b?size=many", "a:b?seed=x", "a:b?part=test", "a:b?size=true"]
)
def test_a_bad_address_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"a:b|reasoning_gym:|:name"):
        Address.parse(bad)


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_are_as_many_as_asked_for_and_the_same_each_time(fake: None) -> None:
    first = load_dataset("reasoning_gym:sums?size=30&seed=1")
    assert len(first) == 30
    assert load_dataset("reasoning_gym:sums?size=30&seed=1") == first
    assert load_dataset("reasoning_gym:sums?size=30&seed=2") != first


def test_no_question_occurs_twice(fake: None) -> None:
    assert len(set(questions("reasoning_gym:sums?size=90"))) == 90


def test_a_generator_with_too_few_questions_says_how_many_there_are(fake: None) -> None:
    with pytest.raises(DatasetError, match="only 100 different questions"):
        load_dataset("reasoning_gym:sums?size=101")


def test_the_parts_of_any_seeds_share_no_question(fake: None) -> None:
    train = {
        question for seed in range(4) for question in questions(f"reasoning_gym:sums?size=40&seed={seed}&part=train")
    }
    held = {q for seed in range(4) for q in questions(f"reasoning_gym:sums?size=10&seed={seed}&part=held_out")}
    assert train
    assert held
    assert not train & held


def test_the_split_of_a_run_shares_no_question(fake: None) -> None:
    tasks = load_tasks(TrainConfig(data={"train": "reasoning_gym:sums?size=60"}), None, None, None)
    parts = [{task["question"] for task in part} for part in (tasks.train, tasks.validation, tasks.held_out)]
    assert [len(part) for part in parts] == [42, 6, 12]
    assert len(set.union(*parts)) == 60


def test_a_file_of_the_same_name_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reasoning_gym:mine.jsonl").write_text('{"question": "mine"}\n')
    assert questions("reasoning_gym:mine.jsonl") == ["mine"]


# -- scores ----------------------------------------------------------------------------------------------------------


def test_answers_are_scored_by_the_generator(fake: None) -> None:
    task = load_dataset("reasoning_gym:sums?size=1")[0]
    right = task["answer"]
    assert gym.score(task, right) == 1.0
    assert gym.score(task, f"I think <answer>7</answer>, no, <answer> {right} </answer>!") == 1.0
    assert gym.score(task, f"not {right}") == 0.01
    assert gym.score(task, None) == 0.01


def test_tasks_of_another_source_or_version_are_refused(fake: None) -> None:
    task = load_dataset("reasoning_gym:sums?size=1")[0]
    with pytest.raises(RewardError, match="takes tasks of reasoning_gym"):
        gym.score({"question": "?"}, "1")
    with pytest.raises(RewardError, match="make the tasks anew"):
        gym.score({**task, "question": "9 + 9 + 9"}, "1")


# -- where addresses are given ---------------------------------------------------------------------------------------


def test_env_brings_tasks_agent_and_reward() -> None:
    config = load_settings(TrainConfig, overrides=["env=reasoning_gym:chain_sum?size=7"])
    assert config.data.train == "reasoning_gym:chain_sum?size=7"
    assert config.agent == "agentlightning.integrations.reasoning_gym:play"
    assert config.reward == "agentlightning.integrations.reasoning_gym:score"
    assert TrainConfig.model_validate(config.model_dump()) == config


def test_what_is_set_stays() -> None:
    config = TrainConfig(
        env="reasoning_gym:chain_sum", agent="mine:agent", reward="mine:reward", data={"train": "mine"}
    )
    assert (config.agent, config.reward, config.data.train) == ("mine:agent", "mine:reward", "mine")


def test_an_unknown_kind_of_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="known kinds: reasoning_gym"):
        load_settings(TrainConfig, overrides=["env=nothing:x"])


def test_the_reward_has_a_short_name() -> None:
    assert str(function_spec("reasoning_gym")) == "agentlightning.integrations.reasoning_gym:score"


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym._generator.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'agentlightning\[reasoning-gym\]'"):
        load_dataset("reasoning_gym:chain_sum")


async def test_the_models_refusal_reaches_the_agent() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(400, text="too long"))
    async with httpx.AsyncClient(base_url="http://model/v1", transport=transport) as client:
        with pytest.raises(AgentError, match="400: too long"):
            await chat(client, "policy", [{"role": "user", "content": "?"}])


# -- the real package ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_generators_score_their_own_answers() -> None:
    pytest.importorskip("reasoning_gym")
    for name in ("chain_sum", "countdown", "rearc", "syllogism"):
        tasks = load_dataset(f"reasoning_gym:{name}?size=5&seed=1")
        assert len({task["question"] for task in tasks}) == 5
        assert [gym.score(task, f"<answer>{task['answer']}</answer>") for task in tasks] == [1.0] * 5
        assert all(gym.score(task, "no idea") < 0.5 for task in tasks)
    with pytest.raises(DatasetError, match=r"no generator 'chain_sums' .*chain_sum"):
        load_dataset("reasoning_gym:chain_sums")
    with pytest.raises(DatasetError, match="max_term"):
        load_dataset("reasoning_gym:chain_sum?max_term=2")
