"""Promises of `Trainer.train` without an agent: it learns from what the store holds, or says what is missing."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import agentlightning as agl
from agentlightning.chat.hf import HFChatFormat
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.config import OptimizerConfig
from agentlightning.training.report.result import RecordedResult

pytestmark = pytest.mark.integration

FAST = OptimizerConfig(lr=3e-3)


def probability(directory: Path, chat: HFChatFormat, answer: str, task: str = "question 0") -> float:
    """p(answer | task) under a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt, tokens = chat.encode(chat.render([{"role": "user", "content": task}])), chat.encode(answer)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum().exp())


def preference(directory: Path, chat: HFChatFormat) -> float:
    yes, no = probability(directory, chat, "yes"), probability(directory, chat, "no")
    return yes / (yes + no)


def trainer(store: Any, tiny: Path, tmp_path: Path, **settings: Any) -> agl.Trainer:
    algorithm = settings.pop("algorithm", None) or agl.LightningRL(tasks_per_step=3, optimizer=FAST, **settings)
    return agl.Trainer(store=store, algorithm=algorithm, model=tiny, run_dir=Path(mkdtemp(dir=tmp_path)) / "run")


def offline(result: agl.TrainingResult) -> Any:
    assert isinstance(result.recorded, RecordedResult)
    return result


@pytest.mark.parametrize("method", ["importance", "awr", "rejection"])
def test_each_method_makes_rewarded_answers_more_probable(
    method: Any, store: Any, fill: Any, tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    fill(store, tokens=True)
    result = offline(trainer(store, tiny, tmp_path).train(10, method=method))
    assert (result.recorded.method, result.steps) == (method, 10)
    assert preference(result.checkpoint, chat) > preference(tiny, chat) + 0.1


def test_the_method_follows_from_what_was_recorded_and_is_said_with_counts(
    store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store, tokens=True)
    result = offline(trainer(store, tiny, tmp_path).train(1))
    assert result.recorded.method == "importance"
    assert result.recorded.notes[0] == (
        "LightningRL learns by importance-weighted policy gradient: 12 sessions of 3 tasks, 12 of them with"
        " log-probabilities, 6 with a reward of 0.5 or more"
    )


def test_text_alone_is_learned_by_regression(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    result = offline(trainer(store, tiny, tmp_path).train(1))
    assert (result.recorded.method, result.recorded.rendered_calls, result.recorded.foreign_calls) == ("awr", 12, 0)


def test_supervised_learning_without_a_dataset_imitates_the_successes_of_the_store(
    store: Any, fill: Any, tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    fill(store)
    algorithm = agl.SFTAlgorithm(steps=8, optimizer=FAST)
    result = offline(trainer(store, tiny, tmp_path, algorithm=algorithm).train())
    assert (result.recorded.algorithm, result.steps, result.recorded.sessions) == (
        "sft",
        8,
        3,
    )  # one of equal answers to a task
    assert preference(result.checkpoint, chat) > preference(tiny, chat) + 0.1


def test_equal_rewards_leave_the_successes_to_imitate(store: Any, add: Any, tiny: Path, tmp_path: Path) -> None:
    for _ in range(4):
        asyncio.run(add(store, "question", "yes", 1.0))
    result = offline(trainer(store, tiny, tmp_path).train(2))
    assert (result.recorded.method, result.recorded.sessions) == ("rejection", 4)


def test_tokens_of_another_tokenizer_are_rendered_anew_and_counted(
    store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store, tokens=True, shift=7)
    result = offline(trainer(store, tiny, tmp_path).train(1))
    assert (result.recorded.method, result.recorded.foreign_calls) == ("awr", 12)
    assert any("another tokenizer" in note for note in result.recorded.notes)


def test_sessions_without_log_probabilities_are_counted_where_most_have_them(
    store: Any, fill: Any, add: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store, tokens=True)
    asyncio.run(add(store, "question 0", "yes", 1.0))
    asyncio.run(add(store, "question 0", "yes", 1.0, tokens=True, temperature=0.0))
    result = offline(trainer(store, tiny, tmp_path).train(1))
    assert (result.recorded.method, result.recorded.left_out) == ("importance", {"no_logprobs": 2})


def test_the_snippet_of_the_readme_runs_without_any_setting(fill: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    store = agl.LightningStore()
    fill(store)
    algorithm = agl.LightningRL(store=store, credit_assignment="hierarchical")
    trained = agl.Trainer(store=store, algorithm=algorithm)
    result = offline(trained.train(num_iterations=2))
    assert (result.steps, result.checkpoint.exists()) == (2, True)


def test_a_store_given_to_the_algorithm_is_used(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    algorithm = agl.LightningRL(store=store, optimizer=FAST)
    assert offline(trainer(None, tiny, tmp_path, algorithm=algorithm).train(1)).recorded.sessions == 12


@pytest.mark.parametrize("name", ["target_agent", "target"])
def test_only_the_calls_of_the_target_agent_carry_loss(
    name: str, store: Any, add: Any, fill: Any, tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    fill(store, agent="writer")
    for reward, answer in ((1.0, "apples"), (0.0, "coins")) * 2:
        asyncio.run(add(store, "question 9", answer, reward, agent="critic"))
    result = offline(trainer(store, tiny, tmp_path).train(2, **{name: "writer"}))
    assert result.recorded.left_out == {"no_target_calls": 4}
    with pytest.raises(DatasetError, match=r"called 'editor'; there are 'critic', 'writer'"):
        trainer(store, tiny, tmp_path).train(2, **{name: "editor"})
    with pytest.raises(ConfigError, match="two names of one setting"):
        trainer(store, tiny, tmp_path).train(target_agent="writer", target="critic")


def test_a_second_call_goes_on_with_the_weights_of_the_first(
    store: Any, fill: Any, tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    fill(store)
    trained = trainer(store, tiny, tmp_path)
    once = preference(offline(trained.train(3)).checkpoint, chat)
    assert preference(offline(trained.train(3)).checkpoint, chat) > once


def test_sessions_of_single_tasks_share_a_baseline(store: Any, add: Any, tiny: Path, tmp_path: Path) -> None:
    for number in range(6):
        asyncio.run(add(store, f"question {number}", "yes" if number % 2 else "no", float(number % 2)))
    result = offline(trainer(store, tiny, tmp_path).train(1))
    assert result.recorded.counts["tokens_trained"] > 0
    assert "6 tasks have one session each; their baseline is the mean of such sessions" in result.recorded.notes


def test_measured_rollouts_are_never_learned_from(store: Any, fill: Any, add: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    asyncio.run(add(store, "question 0", "yes", 1.0, mode="test"))
    result = offline(trainer(store, tiny, tmp_path).train(1))
    assert (result.recorded.sessions, result.recorded.left_out) == (12, {"modes_val_and_test": 1})


def test_missing_and_unusable_rewards_are_counted(store: Any, fill: Any, add: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    asyncio.run(add(store, "question 0", "yes"))
    asyncio.run(add(store, "question 0", "yes", 1e15))
    result = offline(trainer(store, tiny, tmp_path).train(1))
    assert result.recorded.sessions == 12
    assert result.recorded.left_out == {"bad_reward": 1, "missing_reward": 1}


def test_what_cannot_be_learned_from_is_said_with_the_way_out(store: Any, add: Any, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no finished session.*track_session"):
        trainer(store, tiny, tmp_path).train(1)
    asyncio.run(add(store, "question", "yes"))
    with pytest.raises(DatasetError, match=r"no session has a reward.*emit_reward"):
        trainer(store, tiny, tmp_path).train(1)
    for _ in range(3):
        asyncio.run(add(store, "question", "yes", 0.0))
    with pytest.raises(DatasetError, match="needs log-probabilities"):
        trainer(store, tiny, tmp_path).train(1, method="importance")
    with pytest.raises(DatasetError, match="learns from differences in reward"):
        trainer(store, tiny, tmp_path).train(1, method="awr")
    with pytest.raises(DatasetError, match="nothing to prefer"):
        trainer(store, tiny, tmp_path).train(1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_iterations": 0}, "steps = 0 .given to train. should be greater"),
        ({"method": "magic"}, r"""method = "magic" .* should be 'auto', 'importance'"""),
        ({"follow_timeout": 1.0}, "with follow=True only"),
        ({"eval_agent": print}, "go together"),
        ({"train_dataset": [1]}, "tasks are for an agent to run"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    arguments: Any, complaint: str, store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store, 1)
    with pytest.raises(ConfigError, match=complaint):
        trainer(store, tiny, tmp_path).train(**arguments)


@pytest.mark.slow
def test_following_learns_from_each_session_once_as_they_arrive(
    store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store, 1, tokens=True)

    def later() -> None:
        time.sleep(1.0)
        fill(agl.LightningStore(tmp_path / "sessions.db"), 1, tokens=True)

    thread = threading.Thread(target=later)
    thread.start()
    learning = trainer(store, tiny, tmp_path, group_size=2, algorithm=None)
    learning.algorithm = agl.LightningRL(tasks_per_step=1, group_size=4, optimizer=FAST)
    result = offline(learning.train(5, follow=True, follow_timeout=4.0))
    thread.join()
    assert (result.recorded.method, result.steps, result.recorded.sessions) == ("importance", 2, 8)
    assert any("no session arrived" in note for note in result.recorded.notes)


@pytest.mark.slow
def test_the_gain_is_measured_on_held_out_tasks(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)

    @agl.rollout
    def agent(task: Any) -> float:
        return float(task["value"])

    tasks = [{"value": 0.25}, {"value": 0.75}]
    trained = trainer(store, tiny, tmp_path).train(1, eval_agent=agent, held_out_dataset=tasks)
    gain = offline(trained).held_out["greedy"]
    assert (gain.before, gain.after, gain.gain, gain.tasks) == (0.5, 0.5, 0.0, 2)
    assert offline(trained).as_json()["held_out"]["sampled"]["tasks"] == 2


def test_with_an_agent_the_same_call_is_fit(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = agl.Trainer(algorithm=agl.LightningRL(steps=9), run_dir=tmp_path / "run")
    seen: list[Any] = []
    monkeypatch.setattr(agl.Trainer, "fit", lambda self, *tasks, **more: seen.append((self, tasks, more)))
    trained.train(3, target_agent="writer", agent="module:agent", train_dataset=[1])
    [(run, *given)] = seen
    assert given == [("module:agent", [1], None), {"held_out_dataset": None}]
    for settings in (run.config.algorithm, run.algorithm.config):
        assert (settings.steps, settings.target_agent) == (3, "writer")
    assert trained.config.algorithm.steps == 9, "what was given to train is for that run"
    with pytest.raises(ConfigError, match="follow: for recorded sessions only"):
        trained.train(agent="module:agent", follow=True)
