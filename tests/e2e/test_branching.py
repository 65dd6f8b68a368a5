"""`[curriculum.branching]` in whole runs of a tiny model: rollouts of a group branch off others through the gateway."""

import asyncio
import json

import pytest

import agentlightning as agl
from agentlightning.config import CurriculumConfig, EvaluationConfig, RunnerConfig, TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.span import REPLAYS

pytestmark = pytest.mark.slow

TASKS = [{"word": word} for word in ("red", "green", "blue", "white")]


@agl.rollout
def uses_a_tool(task, llm):
    """Three calls, the last two after a message of a tool."""
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    messages = [{"role": "user", "content": f"say {task['word']}"}]
    said = ""
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        said = answer.choices[0].message.content or ""
        call = {"id": "call_1", "type": "function", "function": {"name": "echo", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": str(len(said))},
        ]
    return float(len(said) % 3)


@agl.rollout
def never_the_same(task, llm):
    """Its prompt differs from one rollout to the next."""
    import uuid

    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    said = ""
    for _ in range(2):
        messages = [{"role": "user", "content": f"{uuid.uuid4().hex} {task['word']}"}]
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        said = answer.choices[0].message.content or ""
    return float(len(said) % 3)


def settings(branching, **run):
    return TrainConfig.model_validate(
        {
            "curriculum": CurriculumConfig(branching=branching),
            "evaluation": EvaluationConfig(every=0, modes=("greedy",)),
            "runner": RunnerConfig(concurrency=8, max_attempts=1),
            "run": run,
            "policy": {"value_head": "linear"},
        }
    )


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("max_staleness", "credit"), [(0, "state_value"), (1, "value")])
def test_half_of_a_group_branches_off_the_other_half_and_all_of_it_is_trained(tmp_path, max_staleness, credit):
    run_dir = tmp_path / "run"
    everywhere = agl.config.Branching(share=0.5, threshold=-99.0, after="any")
    loss = ["ppo", "value"] if credit == "value" else "ppo"
    algorithm = agl.LightningRL(steps=2, tasks_per_step=2, group_size=4, credit=credit, loss=loss, kl_in_reward=0.01)
    config = settings(everywhere, max_staleness=max_staleness)
    agl.Trainer(config, algorithm=algorithm, run_dir=run_dir).fit(uses_a_tool, TASKS)
    for line in metrics(run_dir):
        assert line["branches"] == 4
        assert line["failed"] == line["rejected"] == 0
        assert 4 <= line["replayed_calls"] + line["replay_mismatches"] <= 8
        assert line["replayed_calls"] > 0
        assert line["rollouts_trained"] > 0

    async def spans():
        store = agl.LightningStore(run_dir / "store.db")
        found = [span for each in await store.query_rollouts() for span in await store.query_spans(each.rollout_id)]
        await store.close()
        return {span.span_id: span for span in found}

    found = asyncio.run(spans())
    replayed = [span for span in found.values() if REPLAYS in span.attributes]
    assert replayed
    for span in replayed:
        recorded = found[span.attributes[REPLAYS][1]].attributes
        for name in ("prompt_token_ids", "response_token_ids", "logprobs", "policy_version"):
            assert span.attributes[f"agentlightning.{name}"] == recorded[f"agentlightning.{name}"]

    longer = agl.LightningRL(algorithm.config, steps=3)
    agl.Trainer.resume(run_dir, algorithm=longer).fit(uses_a_tool)
    assert metrics(run_dir)[-1]["branches"] == 4, "a resumed run goes on with it"


def test_an_agent_that_does_not_repeat_itself_is_served_as_any_other_and_counted(tmp_path):
    everywhere = agl.config.Branching(share=0.5, threshold=-99.0, after="any")
    algorithm = agl.LightningRL(steps=1, tasks_per_step=2, group_size=4)
    agl.Trainer(settings(everywhere), algorithm=algorithm, run_dir=tmp_path / "run").fit(never_the_same, TASKS)
    (line,) = metrics(tmp_path / "run")
    assert (line["branches"], line["replayed_calls"], line["replay_mismatches"]) == (4, 0, 4)
    assert line["failed"] == line["rejected"] == 0


def test_where_nothing_is_uncertain_all_rollouts_are_independent(tmp_path):
    algorithm = agl.LightningRL(steps=1, tasks_per_step=2, group_size=4)
    config = settings(agl.config.Branching(threshold=1e9))
    agl.Trainer(config, algorithm=algorithm, run_dir=tmp_path / "run").fit(uses_a_tool, TASKS)
    (line,) = metrics(tmp_path / "run")
    assert (line["branches"], line["replayed_calls"], line["replay_mismatches"]) == (0, 0, 0)
    assert line["rollouts"] == 8


@pytest.mark.parametrize("curriculum", [{"turns": {"start": 1}}, {"branching": {}}])
def test_a_run_without_a_policy_refuses_settings_on_its_calls(tmp_path, curriculum):
    class Nothing(agl.Algorithm):
        name = "nothing"
        learns_weights = False
        total_steps = 1

        async def run(self, training):
            raise AssertionError

    config = TrainConfig(curriculum=CurriculumConfig.model_validate(curriculum))
    with pytest.raises(ConfigError, match=rf"curriculum\.{next(iter(curriculum))} needs a policy"):
        agl.Trainer(config, algorithm=Nothing(), run_dir=tmp_path / "run").fit(uses_a_tool, TASKS)
