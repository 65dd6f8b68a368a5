"""`[curriculum] turns` in whole runs of a tiny model: any agent is bound by it, and its rollouts count as truncated."""

import json

import pytest

import agentlightning as agl
from agentlightning.config import CurriculumConfig, EvaluationConfig, RunnerConfig, TrainConfig
from agentlightning.util.settings import load_settings

TASKS = [{"word": word} for word in ("red", "green", "blue", "white")]


@agl.rollout
def never_ends(task, llm):
    """An agent that knows no limit: it gives its reward after six answers."""
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    for turn in range(6):
        messages = [{"role": "user", "content": f"say {task['word']} {turn}"}]
        client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
    return 1.0


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_rollouts_end_at_the_limit_of_their_step_which_a_resumed_run_goes_on_with(tmp_path):
    run_dir = tmp_path / "run"
    settings = TrainConfig(
        curriculum=CurriculumConfig(turns=agl.TurnLimit(start=2, grow=2, every=1, reward=-1.0)),
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
        agl.TurnLimit(start=3, max=2)
