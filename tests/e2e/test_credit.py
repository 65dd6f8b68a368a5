"""Credit rules in whole runs of a tiny model: what they need reaches them, and what they remember survives a resume."""

import json

import pytest

import agentlightning as agl
from agentlightning.config import EvaluationConfig, RunnerConfig, TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.policy.config import PolicyConfig

pytestmark = pytest.mark.slow

TASKS = [{"word": word, "answer": word} for word in ("red", "green", "blue", "white")]


def settings(**policy):
    return TrainConfig(
        policy=PolicyConfig(**policy),
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
        runner=RunnerConfig(concurrency=8, max_attempts=1),
    )


@agl.rollout
def two_turns(task, llm):
    """Two calls whose second observation is one of two."""
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    messages = [{"role": "user", "content": f"say {task['word']}"}]
    said = []
    for _ in range(2):
        with agl.track_agent("speaker"):
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        said.append(answer.choices[0].message.content or "")
        observed = "long" if len(said[-1]) > 9 else "short"
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": observed}]
    agl.emit_reward(float(len(said[0])), agent="speaker")
    return float(len("".join(said)) % 7)


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_hierarchical_credit_chooses_for_each_group_and_remembers_tasks_across_a_resume(tmp_path):
    run_dir = tmp_path / "run"
    algorithm = agl.LightningRL(
        steps=1, tasks_per_step=4, group_size=4, credit_assignment={"type": "hierarchical", "repeated": 0.01}
    )
    agl.Trainer(settings(), algorithm=algorithm, run_dir=run_dir).fit(two_turns, TASKS)
    (first,) = metrics(run_dir)
    assert first["credit_hierarchical_state_value"] > 0
    assert first["credit_states"] >= first["credit_states_repeated"] > 0
    (saved,) = run_dir.glob("checkpoints/step-*/algorithm.json")
    tables = json.loads(saved.read_bytes())["state"]["credit_memory"]["tables"]
    assert 1 <= len(tables) <= 4

    longer = agl.LightningRL(algorithm.config, steps=2)
    agl.Trainer.resume(run_dir, algorithm=longer).fit(two_turns)
    visits = longer.state_dict()["credit_memory"]["tables"]
    assert max(count for task in tables for count, _ in visits[task].values()) > 4, "visits of both steps are pooled"


def test_a_critic_is_trained_on_the_returns_of_a_rule_and_used_by_it(tmp_path):
    algorithm = agl.LightningRL(steps=2, tasks_per_step=2, group_size=2, credit="value", loss=["ppo", "value"])
    agl.Trainer(settings(value_head="linear"), algorithm=algorithm, run_dir=tmp_path / "run").fit(two_turns, TASKS)
    lines = metrics(tmp_path / "run")
    assert sum(line["credit_value_groups"] for line in lines) > 0
    assert any(line.get("value_loss", 0) > 0 for line in lines)


def test_a_critic_that_the_policy_lacks_is_an_error_that_names_the_setting(tmp_path):
    algorithm = agl.LightningRL(steps=1, tasks_per_step=2, group_size=2, credit="value", loss=["ppo", "value"])
    with pytest.raises(ConfigError, match=r"policy\.value_head"):
        agl.Trainer(settings(), algorithm=algorithm, run_dir=tmp_path / "run").fit(two_turns, TASKS)


@pytest.mark.parametrize("credit", ["information_gain", "graph", "group_step", "state_value"])
def test_rules_train_an_agent_with_rewards_of_its_own(tmp_path, credit):
    algorithm = agl.LightningRL(steps=1, tasks_per_step=4, group_size=4, credit=credit, agent_rewards="own")
    agl.Trainer(settings(), algorithm=algorithm, run_dir=tmp_path / "run").fit(two_turns, TASKS)
    (line,) = metrics(tmp_path / "run")
    assert line["groups_trained"] > 0
    assert line["rejected"] == 0
