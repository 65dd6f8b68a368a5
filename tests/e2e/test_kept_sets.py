"""A run samples with top_p and learns: the tokens that it kept are recorded, and trained over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.config import EvaluationConfig, RunnerConfig, TrainConfig
from agentlightning.errors import TrainingStopped

pytestmark = pytest.mark.slow

SETTINGS = TrainConfig(
    evaluation=EvaluationConfig(every=0, modes=("greedy",)), runner=RunnerConfig(concurrency=16, max_attempts=1)
)
TASKS = [{"word": word} for word in ("red", "green", "blue", "white", "black", "pink", "grey", "brown")]
BATCH = {"tasks_per_step": 4, "group_size": 4, "optimizer": {"lr": 1e-3}}


def say(task, llm):
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"say {task['word']}"}], max_tokens=6
    )
    text = answer.choices[0].message.content or ""
    return sum(character.isalpha() for character in text) / max(1, len(text))


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_rollouts_sampled_with_top_p_are_learned_from(tmp_path):
    algorithm = agl.LightningRL(
        steps=16, top_p=0.9, loss=["ppo", {"type": "kl"}], tasks_per_step=4, group_size=8, optimizer={"lr": 4e-3}
    )
    result = agl.Trainer(SETTINGS, algorithm=algorithm, run_dir=tmp_path / "run").fit(agl.rollout(say), TASKS)
    steps = metrics(tmp_path / "run")
    assert result.steps == len(steps) == 16
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    for step in steps:
        assert "rejected_unfaithful_sampling" not in step
        if step["groups_trained"]:
            assert step["tokens_with_kept_sets"] == step["tokens_trained"] > 0
            assert 1 <= step["kept_set_size"] <= 1024
            assert step["mismatch_kl"] < 1e-6


def test_a_rollout_whose_sets_are_missing_is_named_and_counted_and_the_others_train(tmp_path, monkeypatch, capsys):
    from agentlightning.policy.local import LocalPolicy

    sample, calls = LocalPolicy.sample_adapter, []

    async def forgetful(self, adapter, prompt, params, *args, **more):
        found = await sample(self, adapter, prompt, params, *args, **more)
        calls.append(params.top_p)
        return replace(found, kept_sets=None) if params.top_p < 1 and calls.count(0.9) == 3 else found

    monkeypatch.setattr(LocalPolicy, "sample_adapter", forgetful)
    algorithm = agl.LightningRL(steps=2, top_p=0.9, **BATCH)
    result = agl.Trainer(SETTINGS, algorithm=algorithm, run_dir=tmp_path / "run").fit(agl.rollout(say), TASKS)
    assert result.rejected_rollouts == {"unfaithful_sampling": 1}
    first, second = metrics(tmp_path / "run")
    assert first["rejected_unfaithful_sampling"] == 1
    assert "rejected_unfaithful_sampling" not in second
    assert first["rollouts_trained"] > 4
    assert first["tokens_with_kept_sets"] == first["tokens_trained"]


def test_a_run_in_which_every_set_is_too_large_stops_and_says_what_helps(tmp_path):
    settings = SETTINGS.model_copy(update={"policy": agl.config.PolicyConfig(max_kept_tokens=2)})
    trainer = agl.Trainer(settings, algorithm=agl.LightningRL(steps=1, top_k=5, **BATCH), run_dir=tmp_path / "run")
    with pytest.raises(TrainingStopped, match=r"sampled with top_k=5; .*raise that or lower top_k"):
        trainer.fit(agl.rollout(say), TASKS)
    resumed = agl.Trainer.resume(tmp_path / "run", changes=["policy.max_kept_tokens=5"])
    assert resumed.fit(agl.rollout(say)).steps == 1
