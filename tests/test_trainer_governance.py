"""Whole runs without weights: the reward guard, the promotion gate and the audit log, through the trainer.

The store, the trainer, the rollout source and the run directory are the real ones. A coroutine stands in for the runner
and its agent, which answers with its prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithms.training import Collected
from agentlightning.training.governance import read_audit
from agentlightning.training.report.result import as_html, markdown_report

pytestmark = pytest.mark.integration

TRAIN = [{"word": word} for word in ("red", "green", "blue", "white")]
GUARD = [{"word": f"colour {number}"} for number in range(12)]
HELD_OUT = [{"word": "pink"}, {"word": "grey"}]


class Publishes(agl.Algorithm):
    """Publishes one prompt at each step, good or bad."""

    learns_weights = False

    def __init__(self, prompts: Sequence[str], reward_weights: dict[str, float] | None = None) -> None:
        self.prompts, self.weights = list(prompts), reward_weights

    @property
    def reward_weights(self) -> dict[str, float] | None:
        return self.weights

    @property
    def total_steps(self) -> int:
        return len(self.prompts)

    async def run(self, training: agl.Training) -> None:
        while training.step < self.total_steps:
            template = agl.PromptTemplate(template=self.prompts[training.step])
            await training.publish({"prompt": template})
            collected = await training.collect(tasks=3, group_size=4, temperature=1.0)
            await training.finish_step(collected, {})


class Job:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = agl.InMemoryLightningStore()
        self.reward: Callable[[str, int], Any] = lambda answer, number: float("please" in answer)
        """(answer, number of the rollout) -> reward; None for none."""
        self.ran = 0

    @contextlib.asynccontextmanager
    async def agents(self) -> AsyncIterator[None]:
        work = asyncio.create_task(self._work())
        try:
            yield
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _work(self) -> None:
        while True:
            rollout = await self.store.dequeue_rollout(timeout=5)
            if rollout is None:
                continue
            update = await self.store.get_resources_by_id(rollout.resources_id or "")
            assert update is not None
            prompt = update.resources["prompt"]
            assert isinstance(prompt, agl.PromptTemplate)
            answer = prompt.format(**rollout.input)
            ids = rollout.rollout_id, rollout.attempt.attempt_id
            reward = self.reward(answer, self.ran)
            self.ran += 1
            if reward is not None:
                key = "agentlightning.reward.values" if isinstance(reward, dict) else "gen_ai.evaluation.score.value"
                span = agl.Span(*ids, "gen_ai.evaluation.result", 0.0, span_id="1" * 16, attributes={key: reward})
                await self.store.add_span(span)
            await self.store.update_attempt(*ids, status="succeeded", metadata={"output": answer})

    async def fit(self, algorithm: Publishes, start: str = "{word}, please", **settings: Any) -> agl.TrainingResult:
        config = agl.TrainConfig(
            evaluation=agl.config.EvaluationConfig(every=0, modes=("greedy",)),
            runner=agl.config.RunnerConfig(hosts=0, max_attempts=1),
            **settings,
        )
        trainer = agl.Trainer(
            config,
            algorithm=algorithm,
            store=self.store,
            run_dir=self.directory / "run",
            initial_resources={"prompt": agl.PromptTemplate(template=start)},
        )
        async with self.agents():
            return await trainer.fit_async(train_dataset=TRAIN, val_dataset=GUARD, held_out_dataset=HELD_OUT)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "run" / "metrics.jsonl").read_text().splitlines()]

    @property
    def prompt(self) -> str:
        """In the artefact."""
        resources = json.loads((self.directory / "run" / "checkpoint" / "resources.json").read_text())
        return resources["prompt"]["template"]


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    made = Job(tmp_path)
    yield made
    await made.store.close()


# -- the promotion gate ------------------------------------------------------------------------------------------------


async def test_a_planted_regression_is_not_promoted_and_the_store_says_why(job: Job) -> None:
    result = await job.fit(Publishes(["say {word}, please", "{word}!"]), gate=agl.config.GateConfig(every=1))
    assert job.prompt == "say {word}, please"
    assert (result.gate_rejections, result.best_step) == (1, 1)
    assert result.held_out["greedy"].after == 1.0
    assert [line["gate_promoted"] for line in job.metrics] == [1.0, 0.0]
    assert (job.metrics[1]["rolled_back"], job.metrics[1]["returned_to_step"]) == (1.0, 1.0)
    [record] = await job.store.query_rollouts(rollout_id_contains="audit-000002")
    assert record.metadata["audit"] == "rejected"
    assert "loses to the promoted version of step 1 on 12 guard tasks: 1 -> 0" in record.input["reason"]
    version = await job.store.get_resources_by_id(record.resources_id or "")
    assert version is not None
    assert version.resources["prompt"] == agl.PromptTemplate(template="{word}!"), "the store has what was refused"


async def test_a_reward_hack_passes_its_own_reward_and_not_that_of_the_gate(job: Job, tmp_path: Path) -> None:
    """The reward counts letters, so that a prompt which repeats itself earns most."""
    (tmp_path / "honest.py").write_text(
        "def short(task, output):\n    return float(task['word'] in output and len(output) < 40)\n"
    )
    job.reward = lambda answer, number: len(answer) / 100
    hack = Publishes(["{word}, please, and {word}, and {word}, and {word}, and {word}, and {word}"])
    gate = agl.config.GateConfig(every=1, reward=f"{tmp_path / 'honest.py'}:short")
    result = await job.fit(hack, gate=gate)
    assert result.gate_rejections == 1
    assert job.prompt == "{word}, please"
    job.directory /= "without"
    job.directory.mkdir()
    blind = await job.fit(hack, gate=agl.config.GateConfig(every=1))
    assert blind.gate_rejections == 0, "by the reward that it exploits, it is better"


async def test_a_gate_can_end_the_run(job: Job) -> None:
    with pytest.raises(agl.errors.TrainingStopped, match=r'loses to the promoted version(.|\n)*gate.on_loss = "stop"'):
        await job.fit(Publishes(["{word}!", "{word}, please"]), gate=agl.config.GateConfig(every=1, on_loss="stop"))
    assert [line["step"] for line in job.metrics] == [1]


async def test_a_loss_within_the_margin_is_tolerated(job: Job) -> None:
    job.reward = lambda answer, number: 0.9 if "please" in answer else 0.5
    result = await job.fit(Publishes(["{word}!"]), gate=agl.config.GateConfig(every=1, margin=1.0))
    assert result.gate_rejections == 0


async def test_a_version_that_crashes_on_the_guard_set_is_not_promoted(job: Job) -> None:
    job.reward = lambda answer, number: None if "colour" in answer and "!" in answer else 1.0
    result = await job.fit(Publishes(["{word}!"]), gate=agl.config.GateConfig(every=1))
    assert result.gate_rejections == 1


async def test_many_small_losses_do_not_pass_unseen(job: Job) -> None:
    """Each version loses too little to the one before; the second has lost too much to the first."""
    rewards = {"0": 1.0, "1": 0.8, "2": 0.6, "3": 0.4}
    job.reward = lambda answer, number: rewards[answer[0]]
    await job.fit(Publishes(["1{word}", "2{word}"]), start="0{word}", gate=agl.config.GateConfig(every=1, margin=0.25))
    assert [line["gate_promoted"] for line in job.metrics] == [1.0, 0.0]
    assert "the version that the run started from" in read_audit(job.directory / "run")[-1].reason


async def test_a_guard_set_that_is_trained_on_is_refused_with_its_rows(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "guard.jsonl"
    path.write_text("\n".join(json.dumps(task) for task in [{"word": "new"}, TRAIN[2]]))
    with pytest.raises(agl.errors.ConfigError, match=r"1 tasks of the guard set .* training tasks, too: rows 2"):
        await job.fit(Publishes(["{word}"]), gate=agl.config.GateConfig(tasks=str(path)))


async def test_a_resumed_run_keeps_its_promoted_version(job: Job) -> None:
    await job.fit(Publishes(["say {word}, please"]), gate=agl.config.GateConfig(every=1))
    again = Publishes(["say {word}, please", "{word}!"])
    async with job.agents():
        result = await agl.Trainer.resume(job.directory / "run", algorithm=again, store=job.store).fit_async()
    assert (result.steps, result.gate_rejections) == (2, 1)
    assert job.prompt == "say {word}, please"


async def test_an_algorithm_that_ends_before_its_last_step_is_judged_where_it_ends(job: Job) -> None:
    class Ends(Publishes):
        total_steps = 50

        async def run(self, training: agl.Training) -> None:
            for template in self.prompts[training.step :]:
                await training.publish({"prompt": agl.PromptTemplate(template=template)})
                await training.finish_step(Collected(()), {})

    result = await job.fit(Ends(["say {word}, please", "{word}!"]), gate=agl.config.GateConfig(every=10))
    assert (result.steps, result.gate_rejections) == (2, 1)
    assert job.prompt == "{word}, please", "the start, which was promoted last"


# -- the audit log -----------------------------------------------------------------------------------------------------


async def test_the_audit_log_names_what_each_version_was_learned_from(job: Job) -> None:
    await job.fit(Publishes(["a {word}, please", "b {word}, please"]), gate=agl.config.GateConfig(every=2))
    records = read_audit(job.directory / "run")
    assert [(each.action, each.step) for each in records] == [
        ("promoted", 0),
        ("learned", 1),
        ("learned", 2),
        ("promoted", 2),
    ]
    first = records[1]
    assert len(first.rollouts) == 12
    assert all("train-000001" in each for each in first.rollouts)
    assert first.resources == {
        "prompt": {"resource_type": "prompt_template", "template": "a {word}, please", "engine": "f-string"}
    }
    assert records[3].scores["guard"] == 1.0


async def test_runs_without_a_gate_have_an_audit_log_too(job: Job) -> None:
    await job.fit(Publishes(["{word}, please"]))
    assert [each.action for each in read_audit(job.directory / "run")] == ["learned"]


def test_a_directory_without_a_run_has_no_audit_log(tmp_path: Path) -> None:
    with pytest.raises(agl.errors.ConfigError, match="holds no run"):
        read_audit(tmp_path)


def test_a_damaged_audit_log_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "audit.jsonl").write_text("nonsense\n")
    with pytest.raises(agl.errors.ConfigError, match=r"line 1 of .*audit\.jsonl"):
        read_audit(tmp_path)


# -- the reward guard --------------------------------------------------------------------------------------------------


def warnings(result: agl.TrainingResult) -> set[str]:
    return set(result.warning_counts)


async def test_rewards_out_of_range_are_counted_and_warned_of(job: Job) -> None:
    job.reward = lambda answer, number: 7.0
    result = await job.fit(Publishes(["{word}"]), guard=agl.config.RewardGuard(low=0, high=1))
    assert warnings(result) == {"reward_out_of_range"}
    assert job.metrics[0]["guard_out_of_range"] == 12


async def test_a_guard_that_stops_the_run_does_so_before_anything_is_learned(job: Job) -> None:
    job.reward = lambda answer, number: 7.0
    with pytest.raises(agl.errors.TrainingStopped, match=r"step 1: 12 rollouts have a reward out of the range"):
        await job.fit(Publishes(["{word}"]), guard=agl.config.RewardGuard(high=1, on_violation="stop"))
    assert job.metrics == []


async def test_missing_rewards_are_a_share_of_the_finished_rollouts(job: Job) -> None:
    job.reward = lambda answer, number: None if number % 3 == 0 else 1.0
    result = await job.fit(Publishes(["{word}"]), guard=agl.config.RewardGuard())
    assert warnings(result) == {"rewards_missing"}
    assert job.metrics[0]["rewards_missing_share"] == pytest.approx(1 / 3)


async def test_rewards_that_jump_are_drift(job: Job) -> None:
    job.reward = lambda answer, number: 0.2 if "jump" not in answer else 0.9
    result = await job.fit(Publishes(["{word}", "{word}", "jump {word}"]), guard=agl.config.RewardGuard(max_drift=0.6))
    assert warnings(result) == {"reward_drift"}
    assert [line.get("reward_drift") for line in job.metrics] == [None, 0.0, 1.0]


async def test_two_dimensions_that_prefer_different_rollouts_disagree(job: Job) -> None:
    job.reward = lambda answer, number: {"right": float(number % 2), "liked": float(number % 2 == 0)}
    algorithm = Publishes(["{word}"], {"right": 1.0, "liked": 0.0})
    result = await job.fit(algorithm, guard=agl.config.RewardGuard(agree=("right", "liked")))
    assert warnings(result) == {"reward_disagreement"}
    assert job.metrics[0]["reward_disagreement"] == 1.0


async def test_a_second_reward_function_is_compared_with_the_first(job: Job, tmp_path: Path) -> None:
    (tmp_path / "second.py").write_text(
        "def opposite(spans):\n    return -float(spans[0].attributes['gen_ai.evaluation.score.value'])\n"
    )
    job.reward = lambda answer, number: float(number % 4)
    guard = agl.config.RewardGuard(reward=f"{tmp_path / 'second.py'}:opposite", sample=8)
    result = await job.fit(Publishes(["{word}"]), guard=guard)
    assert warnings(result) == {"reward_disagreement"}


@pytest.mark.parametrize(
    "settings", [{"low": 1.0, "high": 0.0}, {"agree": ("right", "right")}, {"max_missing": 2.0}, {"sample": 1}]
)
def test_a_guard_that_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        agl.config.RewardGuard(**settings)


# -- rewards of a group ------------------------------------------------------------------------------------------------


async def test_training_learns_from_the_rewards_of_the_group_and_evaluations_do_not(job: Job, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "def by_id(rollouts):\n"
        "    assert all(each.output == each.task['word'] for each in rollouts)\n"
        "    order = sorted(each.rollout_id for each in rollouts)\n"
        "    places = [order.index(each.rollout_id) for each in rollouts]\n"
        "    return [None if place == 3 else place for place in places]\n"
    )
    job.reward = lambda answer, number: 1.0
    seen: list[float] = []

    class Sees(Publishes):
        async def run(self, training: agl.Training) -> None:
            collected = await training.collect(tasks=3, group_size=4, temperature=1.0)
            seen.extend(each.reward for each in collected.trajectories)
            await training.finish_step(collected, {})

    ranks = f"{tmp_path / 'ranks.py'}:by_id"
    result = await job.fit(Sees(["{word}"]), start="{word}", group_reward=ranks, guard=agl.config.RewardGuard())
    assert sorted(seen) == sorted([0.0, 1.0, 2.0] * 3)
    assert (result.held_out["greedy"].after, result.rejected_rollouts) == (1.0, {"missing_reward": 3})
    assert job.metrics[0]["group_rewards_missing"] == 3
    assert job.metrics[0]["guard_missing"] == 0.25, "the guard sees the rewards that are learned from"


async def test_a_group_reward_that_fails_leaves_the_rewards_missing(job: Job, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text("async def broken(rollouts):\n    return [1.0]\n")
    job.reward = lambda answer, number: 1.0
    result = await job.fit(Publishes(["{word}"]), group_reward=f"{tmp_path / 'ranks.py'}:broken")
    assert result.rejected_rollouts == {"missing_reward": 12}


# -- the report ------------------------------------------------------------------------------------------------------


async def test_the_report_says_what_changed_by_how_much_and_shows_it(job: Job) -> None:
    job.reward = lambda answer, number: float(("please" in answer and "grey" not in answer) or answer == "grey!")
    result = await job.fit(Publishes(["{word}, please <b>"]), start="{word}!")
    text = await asyncio.to_thread(lambda: result.report(store=None))
    assert "pass `store=`" in text
    text = await markdown_report(result.run_dir, 3, job.store)
    assert "| greedy | 0.500 | 0.500 | +0.000 |" in text
    assert "1 won, 1 lost, 0 unchanged, 0 without a reward." in text
    assert '### {"word":"pink"}' in text
    assert "result: pink!" in text
    assert "result: pink, please <b>" in text
    assert "| training rollouts | 12 |" in text
    page = as_html(text)
    assert "<h1>Report of run</h1>" in page
    assert "pink, please &lt;b&gt;" in page, "what agents wrote is no markup"
    assert page.count("<table>") == page.count("</table>") > 3
    page = await asyncio.to_thread(lambda: result.report(format="html", examples=0))
    assert "Changed behaviour" not in page
    with pytest.raises(agl.errors.ConfigError, match="markdown, html"):
        result.report(format="pdf")  # type: ignore[arg-type]


async def test_a_run_that_is_not_finished_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(agl.errors.ConfigError, match="not finished"):
        await markdown_report(tmp_path, 3)
