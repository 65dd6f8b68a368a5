"""`[curriculum] turns` in whole runs of a tiny model: any agent is bound by it, and its rollouts count as truncated."""

import json

import pytest

import agentlightning as agl
from agentlightning.config import CurriculumConfig, EvaluationConfig, RunnerConfig, TrainConfig
from agentlightning.errors import ConfigError, RewardError, TrainingStopped
from agentlightning.util.settings import load_settings

TASKS = [{"word": word} for word in ("red", "green", "blue", "white")]


@agl.rollout
def never_ends(task, llm):
    """An agent that knows no limit: it gives its reward after six answers, or as many as the task says."""
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    for turn in range(task.get("turns", 6)):
        messages = [{"role": "user", "content": f"say {task['word']} {turn}"}]
        client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
    return 1.0


@agl.rollout
def never_calls(task):
    return 1.0


MIXED = [{"word": "black", "turns": 6}, {"word": "gold", "turns": 3}]
LONG = agl.LightningRL(steps=2, tasks_per_step=2, group_size=2)


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_rollouts_end_at_the_limit_of_their_step_which_a_resumed_run_goes_on_with(tmp_path):
    run_dir = tmp_path / "run"
    settings = TrainConfig(
        curriculum=CurriculumConfig(turns=agl.config.TurnLimit(start=2, grow=2, every=1, reward=-1.0)),
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
        runner=RunnerConfig(concurrency=8),
    )
    algorithm = agl.LightningRL(steps=2, tasks_per_step=2, group_size=2, truncated_reward=0.25)
    result = agl.Trainer(settings, algorithm=algorithm, run_dir=run_dir).fit(never_ends, TASKS)
    assert result.held_out["greedy"].before == 1.0, "evaluations have no limit"
    lines = metrics(run_dir)
    assert [line["turn_limit"] for line in lines] == [2, 4]
    assert [line["calls_per_rollout"] for line in lines] == [2, 4]
    assert [line["rollouts_at_turn_limit"] for line in lines] == [4, 4]
    assert [line["rollouts_truncated"] for line in lines] == [4, 4]
    assert [line["failed"] + line["rejected"] for line in lines] == [0, 0]
    assert [line["reward"] for line in lines] == [-1, -1], "the reward that the limit gives"

    agl.Trainer.resume(run_dir, algorithm=agl.LightningRL(algorithm.config, steps=3)).fit(never_ends)
    last = metrics(run_dir)[-1]
    assert last["turn_limit"] == last["calls_per_rollout"] == 6
    assert (last["rollouts_at_turn_limit"], last["reward"]) == (0, 1), "it may do what it wants within the limit"


@pytest.mark.slow
def test_a_limit_on_the_calls_of_a_rollout_ends_loops_in_training_and_in_evaluations(tmp_path):
    settings = TrainConfig(
        curriculum=CurriculumConfig(turns=agl.config.TurnLimit(start=2, grow=9, every=1, reward=-1.0)),
        evaluation=EvaluationConfig(every=0, modes=("greedy",)),
        runner=RunnerConfig(concurrency=8, max_calls=4),
    )
    trainer = agl.Trainer(settings, algorithm=LONG, run_dir=tmp_path / "run")
    result = trainer.fit(never_ends, TASKS, TASKS[:1], held_out_dataset=MIXED)
    assert [line["turn_limit"] for line in metrics(tmp_path / "run")] == [2, 4], "the lower of the two"
    assert result.held_out["greedy"].before == 0.0, "evaluations have it, too: one task of two ends there, with -1"
    with pytest.raises(RewardError, match=r"refused a call after 4 answers \(runner.max_calls, or curriculum.turns\)"):
        agl.evaluate(never_ends, MIXED[:1], model=result.checkpoint, runner=RunnerConfig(max_calls=4))
    assert agl.evaluate(never_ends, MIXED, model=result.checkpoint, runner=RunnerConfig(max_calls=6)).mean == 1.0


@pytest.mark.slow
def test_rollouts_that_a_loop_cost_their_reward_are_counted_by_that_name(tmp_path):
    settings = TrainConfig(
        evaluation=EvaluationConfig(every=0, modes=("greedy",)), runner=RunnerConfig(concurrency=8, max_calls=4)
    )
    trainer = agl.Trainer(settings, algorithm=LONG, run_dir=tmp_path / "run")
    with pytest.raises(TrainingStopped, match=r"refused a call after 4 answers"):
        trainer.fit(never_ends, TASKS, MIXED[1:], held_out_dataset=MIXED[1:])


def test_a_limit_on_the_calls_of_a_model_needs_one(tmp_path):
    with pytest.raises(ConfigError, match=r"runner.max_calls=4 limits the answers of a model .* give model"):
        agl.evaluate(never_ends, TASKS, runner=RunnerConfig(max_calls=4))
    settings = TrainConfig(runner=RunnerConfig(max_calls=4))
    with pytest.raises(ConfigError, match=r"runner.max_calls needs a policy"):
        agl.Trainer(settings, run_dir=tmp_path / "run").dev(never_calls, TASKS)


def test_the_limit_is_a_table_of_settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[curriculum]\nturns = {start = 3, grow = 2, every = 5, max = 8}\n")
    turns = load_settings(TrainConfig, toml=path).curriculum.turns
    assert turns is not None
    assert [turns.at(step) for step in (0, 4, 5, 10, 15, 99)] == [3, 3, 5, 7, 8, 8]
    changed = load_settings(TrainConfig, toml=path, overrides=["curriculum.turns.max=4"]).curriculum.turns
    assert changed is not None
    assert changed.at(99) == 4


def test_a_limit_that_would_shrink_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"max=2 is less than start=3; use at least 3"):
        agl.config.TurnLimit(start=3, max=2)
