"""`algorithm.replay` in whole runs of a tiny model: successes are read from the store again, also by a resumed run."""

import json

import pytest
from tests.support.models import tiny_checkpoint

import agentlightning as agl
from agentlightning.config import EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.policy.config import PolicyConfig

pytestmark = pytest.mark.slow

TASKS = [{"word": "red"}]
HELD_OUT = [{"word": "green"}]


@agl.rollout
def lucky_once(task, llm, rollout):
    """Succeeds in one rollout of each group of the first step, and never again."""
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    messages = [{"role": "user", "content": f"say {task['word']}"}]
    client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    return float("train-000001" in rollout.rollout_id and rollout.rollout_id.endswith("-000"))


def settings(max_staleness):
    return TrainConfig(
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
        runner=RunnerConfig(concurrency=8),
        run=RunConfig(max_staleness=max_staleness),
    )


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_earlier_successes_teach_until_they_are_too_old_and_a_resumed_run_goes_on_with_them(tmp_path, max_staleness):
    run_dir = tmp_path / "run"
    replay = {"max_age": 2, "rollouts": 2}
    algorithm = agl.LightningRL(steps=2, tasks_per_step=1, group_size=2, replay=replay)
    agl.Trainer(settings(max_staleness), algorithm=algorithm, run_dir=run_dir).fit(
        lucky_once, TASKS, HELD_OUT, held_out_dataset=HELD_OUT
    )
    (saved,) = run_dir.glob("checkpoints/step-000002/algorithm.json")
    kept = json.loads(saved.read_bytes())["state"]["replay"]
    assert [name.partition("-")[2] for ids in kept.values() for name in ids] == ["train-000001-0000-000"]

    agl.Trainer.resume(run_dir, algorithm=agl.LightningRL(algorithm.config, steps=4)).fit(lucky_once)
    lines = metrics(run_dir)
    assert lines[2]["replayed_rollouts"] == 1, "read from the store by the resumed run"
    assert lines[2]["groups_trained"] == 1
    assert lines[2]["reward"] == 0
    if max_staleness == 0:
        assert [line["replayed_rollouts"] for line in lines] == [0, 1, 1, 0]
        assert [line["replay_dropped"] for line in lines] == [0, 0, 0, 1]
        assert [line["replay_size"] for line in lines] == [1, 1, 1, 0]
        assert [line.get("staleness_max") for line in lines] == [0, 1, 2, None]
        assert lines[1]["ratio"] != 1, "its tokens are weighed by the ratio to the weights that sampled them"


@agl.rollout
def lucky_agents(task, llm, rollout):
    """Two agents that speak in turn; successful where `lucky_once` is."""
    from openai import OpenAI

    messages = [{"role": "user", "content": f"say {task['word']}"}]
    for agent in ("writer", "editor"):
        client = OpenAI(base_url=llm.endpoint, api_key="unused", default_headers={"x-agentlightning-agent": agent})
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": "again"},
        ]
    return float("train-000001" in rollout.rollout_id and rollout.rollout_id.endswith("-000"))


COMBINATIONS = {
    "kept sets": {"top_p": 0.9},
    "a critic": {"credit": "value", "loss": ["ppo", "value"]},
    "a reference": {"loss": ["ppo", "kl"]},
    "a teacher": {"loss": ["ppo", "distill"], "teacher": "model"},
    "feedback": {"loss": ["ppo", "sdpo"]},
    "adapters of agents": {"agents": {"writer": agl.Lora(r=4), "editor": agl.Lora(r=4)}},
    "an adapter beside a frozen agent": {"agents": {"writer": agl.Lora(r=4), "editor": "frozen"}},
    "adapters and feedback": {"agents": {"writer": agl.Lora(r=4), "editor": "frozen"}, "loss": ["ppo", "sdpo"]},
    "state values": {"credit": "state_value"},
    "a mismatch correction": {"mismatch": "truncate"},
    "several updates of a batch": {"minibatches": 2},
}


@pytest.mark.parametrize("extra", COMBINATIONS.values(), ids=list(COMBINATIONS))
def test_replayed_rollouts_are_trained_beside(tmp_path, extra):
    model = tiny_checkpoint(tmp_path / "model")
    options = {**extra, **({"teacher": str(model)} if "teacher" in extra else {})}
    algorithm = agl.LightningRL(steps=3, tasks_per_step=1, group_size=2, replay={"max_age": 2}, **options)
    config = settings(0).model_copy(
        update={"policy": PolicyConfig(model=str(model), value_head="linear" if "credit" in extra else None)}
    )
    result = agl.Trainer(config, algorithm=algorithm, run_dir=tmp_path / "run").fit(
        lucky_agents, TASKS, HELD_OUT, held_out_dataset=HELD_OUT
    )
    lines = metrics(tmp_path / "run")
    assert [line["replayed_rollouts"] for line in lines] == [0, 1, 1]
    assert [line["groups_trained"] for line in lines] == [1, 1, 1]
    for line in lines:
        assert line["rejected"] == line["failed"] == 0
        assert line["rollouts_not_finite"] == 0
        assert sum(value for name, value in line.items() if name.endswith("grad_norm")) > 0
    assert result.rejected_rollouts == {}
