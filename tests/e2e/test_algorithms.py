"""A trainer runs the very algorithm it is given, and says so when a resumed run lacks it."""

import json

import pytest

import agentlightning as agl
from agentlightning.config import EvaluationConfig, RunnerConfig, TrainConfig
from agentlightning.errors import ResumeError, TrainingStopped

pytestmark = pytest.mark.slow

SETTINGS = TrainConfig(
    evaluation=EvaluationConfig(every=0, modes=("greedy",)), runner=RunnerConfig(concurrency=8, max_attempts=1)
)
TASKS = [{"word": word} for word in ("red", "green", "blue", "white", "black", "pink", "grey", "brown")]


def say(task, llm):
    from openai import OpenAI

    client = OpenAI(base_url=llm.endpoint, api_key="unused")
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"say {task['word']}"}], max_tokens=4
    )
    return float(len(answer.choices[0].message.content or "")) % 7


class TwoSteps(agl.Algorithm):
    """An algorithm of a user's own: it has no settings, and keeps what it sees."""

    def __init__(self):
        self.seen = []

    @property
    def total_steps(self):
        return 2

    async def run(self, training):
        while training.step < self.total_steps:
            collected = await training.collect(tasks=2, group_size=2, temperature=1.0)
            self.seen.append(len(collected.trajectories))
            await training.finish_step(collected, {"reward": 0.0})


class Half(agl.LightningRL):
    """A subclass that changes one method."""

    finished = 0

    async def run(self, training):
        await super().run(training)
        self.finished = training.step


def test_an_algorithm_of_ones_own_is_run_and_named_by_the_run(tmp_path):
    algorithm = TwoSteps()
    trainer = agl.Trainer(SETTINGS, algorithm=algorithm, run_dir=tmp_path / "run")
    result = trainer.fit(agl.rollout(say), TASKS)
    assert algorithm.seen == [4, 4]
    assert (result.steps, result.rollouts) == (2, 8)
    state = json.loads((tmp_path / "run" / "state.json").read_bytes())
    assert state["algorithm"].endswith(":TwoSteps")
    with pytest.raises(ResumeError, match="give it the algorithm it had"):
        agl.Trainer.resume(tmp_path / "run").fit(agl.rollout(say))
    with pytest.raises(ResumeError, match=r"not by .*Half"):
        agl.Trainer.resume(tmp_path / "run", algorithm=Half()).fit(agl.rollout(say))
    assert agl.Trainer.resume(tmp_path / "run", algorithm=TwoSteps()).fit(agl.rollout(say)).steps == 2


async def test_a_subclass_of_lightning_rl_runs_with_its_settings_in_a_notebook_too(tmp_path):
    algorithm = Half(steps=1, tasks_per_step=2, group_size=2)
    result = agl.Trainer(SETTINGS, algorithm=algorithm, run_dir=tmp_path / "run").fit(agl.rollout(say), TASKS)
    assert (algorithm.finished, result.steps, result.rollouts) == (1, 1, 4)


class Writer(agl.LitAgent):
    """An agent that calls itself a writer, and wants another one trained."""

    def rollout(self, task, resources, rollout):
        with agl.track_agent("writer"):
            return say(task, resources["llm"])


def test_an_agent_says_which_of_its_agents_are_trained(tmp_path):
    algorithm = agl.LightningRL(steps=1, tasks_per_step=2, group_size=2)
    trainer = agl.Trainer(SETTINGS, algorithm=algorithm, run_dir=tmp_path / "run")
    with pytest.raises(TrainingStopped, match=r"no call .* of an agent called 'editor'; there are 'writer'"):
        trainer.fit(Writer(trained_agents="editor"), TASKS)
    assert agl.Trainer.resume(tmp_path / "run").fit(Writer(trained_agents="wri.*")).steps == 1


def test_supervised_learning_is_an_algorithm_of_a_trainer(tmp_path):
    dataset = [
        {"messages": [{"role": "user", "content": f"say {task['word']}"}, {"role": "assistant", "content": "so"}]}
        for task in TASKS
    ]
    steps = []
    algorithm = agl.SFTAlgorithm(
        dataset=dataset, batch_size=4, epochs=2, output=tmp_path / "out", on_step=lambda step, _: steps.append(step)
    )
    result = agl.Trainer(SETTINGS, algorithm=algorithm, run_dir=tmp_path / "run").fit(agl.rollout(say), TASKS)
    assert steps == [1, 2, 3, 4]
    assert result.steps == 4
    assert result.held_out["greedy"].tasks == 2
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4
    assert (tmp_path / "out" / "config.json").exists()
    assert (result.checkpoint / "config.json").exists()


class KeepPrompt(agl.Algorithm):
    """An algorithm that trains no weights: it publishes a prompt."""

    learns_weights = False
    total_steps = 1

    async def run(self, training):
        await training.publish({"prompt_template": agl.PromptTemplate(template="say {word}")})
        collected = await training.collect(tasks=2, group_size=2, temperature=1.0)
        await training.finish_step(collected, {"reward": collected.trajectories[0].reward})


def prompt_length(task, prompt_template):
    return float(len(prompt_template.format(**task)))


def test_an_agent_of_prompts_is_run_without_a_model(tmp_path):
    prompt = agl.PromptTemplate(template="{word}")
    trainer = agl.Trainer(
        SETTINGS, algorithm=KeepPrompt(), run_dir=tmp_path / "run", initial_resources={"prompt_template": prompt}
    )
    result = trainer.fit(agl.prompt_rollout(prompt_length), TASKS)
    assert result.held_out["greedy"].gain == 4.0
    assert (result.checkpoint / "resources.json").exists()
    assert not (tmp_path / "run" / "start").exists()
