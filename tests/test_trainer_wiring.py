"""Whole runs with a scripted policy: what was configured reaches the part that uses it.

The store, the gateway, the server, the rollout source, the run directory and the algorithm are the real ones. The
scripted policy stands in for the model, and a coroutine of the test for the runner and its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.sft import SFTAlgorithm
from agentlightning.attempt_address import attempt_key, attempt_path, attempt_secret
from agentlightning.config import CurriculumConfig, EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.errors import TrainingStopped
from agentlightning.policy import open as opening
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.losses import NLLLoss, PPOLoss
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.resources import ProxyLLM
from agentlightning.rollouts import AttemptedRollout
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedPolicy, scripted_weights
from agentlightning.tracing.air import air_rule
from agentlightning.trainer import Trainer
from agentlightning.training.report import write_report
from agentlightning.training.report.result import TrainingResult

Reward = Callable[[Any, str], float | dict[str, float]]
"""(task, answer) -> reward."""


class Run:
    """One run, and what was observed of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.store = InMemoryLightningStore()
        self.directory = directory
        self.policy = ScriptedPolicy(lambda messages, updates: "yes")
        self.policy_config: Any = None
        self.reward: Reward = lambda task, answer: float(task["n"] % 2)
        self.rollouts: list[tuple[str, Any]] = []
        """(rollout id, task) of each rollout, in the order in which they ran."""

        async def open_policy(config: Any) -> ScriptedPolicy:
            self.policy_config = config
            return self.policy

        monkeypatch.setattr(opening, "open_policy", open_policy)
        monkeypatch.setattr(write_report, "draw_curve", lambda *_: None)

    async def fit(self, config: TrainConfig, algorithm: Any = None, **tasks: list[Any]) -> TrainingResult:
        config = config.model_copy(
            update={
                "policy": config.policy.model_copy(update={"model": str(self.directory)}),
                "runner": RunnerConfig(hosts=0, max_attempts=1),
            }
        )
        made = Trainer(config, algorithm=algorithm, store=self.store, run_dir=self.directory / "run")
        async with self._agents():
            return await made.fit_async(**tasks)

    @contextlib.asynccontextmanager
    async def _agents(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(trust_env=False) as client:
            work = asyncio.create_task(self._work(client))
            try:
                yield
            finally:
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work

    async def _work(self, client: httpx.AsyncClient) -> None:
        while True:
            rollout = await self.store.dequeue_rollout(timeout=5)
            if rollout is not None:
                self.rollouts.append((rollout.rollout_id, rollout.input))
                await self._run(client, rollout)

    async def _run(self, client: httpx.AsyncClient, rollout: AttemptedRollout) -> None:
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        resources = await self.store.get_resources_by_id(rollout.resources_id or "")
        assert resources is not None
        llm = resources.resources["llm"]
        assert isinstance(llm, ProxyLLM)
        reply = await client.post(
            f"{llm.get_base_url(*ids)}/chat/completions",
            json={"model": llm.model, "messages": [{"role": "user", "content": f"{ids[0]} {rollout.input}"}]},
        )
        answer = reply.json()["choices"][0]["message"]["content"]
        event = {"event_type": "reward", "data": {"value": self.reward(rollout.input, answer)}}
        key = {"authorization": f"Bearer {attempt_key(attempt_secret(None), *ids)}"}
        reply = await client.post(f"{llm.root_url}{attempt_path(*ids)}/events", json=event, headers=key)
        reply.raise_for_status()
        await self.store.update_attempt(*ids, status="succeeded")

    def tasks(self, purpose: str) -> list[Any]:
        """The tasks of the rollouts that were made for a purpose: `train-000000`, `validation`, `before-greedy` ..."""
        return [task for rollout_id, task in self.rollouts if purpose in rollout_id]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.directory / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def temperatures(self, purpose: str) -> set[float]:
        """At which the policy sampled the calls of such rollouts."""
        return {
            params.temperature for prompt, params in self.policy.calls if purpose in self.policy.chat.decode(prompt)
        }


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(monkeypatch, tmp_path)
    yield made
    await made.store.close()


TASKS = {
    "train_dataset": [{"n": n} for n in range(6)],
    "val_dataset": [{"n": 10}, {"n": 11}],
    "held_out_dataset": [{"n": 20}, {"n": 21}],
}


def greedy(**settings: Any) -> TrainConfig:
    return TrainConfig(evaluation=EvaluationConfig(modes=("greedy",), **settings))


def numbers(tasks: list[Any]) -> set[int]:
    return {task["n"] for task in tasks}


def columns(run: Run, name: str) -> list[list[float]]:
    """The trained tokens' values of the first update, for each node that has some."""
    return [
        list(values)
        for sample in run.policy.recorded[0].samples
        for node, values in zip(sample.tree.nodes, getattr(sample, name), strict=True)
        if node.sampled
    ]


async def test_the_settings_of_an_algorithm_reach_the_samples_and_the_policy(run: Run) -> None:
    run.policy = ScriptedPolicy(lambda messages, updates: "long answer" if "-001" in messages[-1]["content"] else "no")
    rewards = iter([{"right": 1.0, "style": 1.0}, {"right": 0.0, "style": 1.0}] * 99)
    run.reward = lambda task, answer: next(rewards)
    algorithm = LightningRL(
        steps=2,
        tasks_per_step=1,
        group_size=2,
        minibatches=3,
        credit={"type": "uniform", "normalize_std": False},
        aggregate="token",
        loss=PPOLoss(clip_low=0.1),
        reward_weights={"right": 0.5, "style": 7.0},
        optimizer=OptimizerConfig(schedule="linear", betas=(0.7, 0.8), weight_decay=0.1),
    )
    config = greedy(every=0).model_copy(update={"policy": PolicyConfig(token_budget=123)})
    result = await run.fit(config, algorithm, **TASKS)
    assert {value for values in columns(run, "advantages") for value in values} == {0.25, -0.25}, (
        "reward_weights, credit"
    )
    weights = [value for values in columns(run, "weights") for value in values]
    assert weights == [pytest.approx(1 / len(weights))] * len(weights), "aggregate"
    options = run.policy.recorded[0].options
    assert options["loss"] == PPOLoss(clip_low=0.1)
    assert (options["minibatches"], options["token_budget"]) == (3, 123)
    optimizer = run.policy_config.optimizer
    assert (optimizer.betas, optimizer.weight_decay, optimizer.schedule) == ((0.7, 0.8), 0.1, "linear")
    assert optimizer.total_steps == 2 * 3, "the schedule ends with the run"
    assert result.held_out["greedy"].before == 0.5 + 7.0 - 0.25, "reward_weights hold for evaluations, too"


async def test_supervised_learning_trains_by_its_own_settings(run: Run) -> None:
    conversation = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "yes"}]
    algorithm = SFTAlgorithm(dataset=[conversation] * 4, batch_size=2, epochs=3, token_budget=77)
    await run.fit(greedy(every=0), algorithm, **TASKS)
    assert [update.options for update in run.policy.recorded] == [{"loss": NLLLoss(), "token_budget": 77}] * 6
    assert (run.policy_config.optimizer.total_steps, run.policy_config.objective) == (6, "supervised")


async def test_every_part_of_the_tasks_is_used_for_its_own_purpose(run: Run) -> None:
    await run.fit(greedy(every=1), LightningRL(steps=3, tasks_per_step=2, group_size=2), **TASKS)
    batches = [numbers(run.tasks(f"train-{step:06d}")) for step in range(3)]
    assert [len(tasks) for tasks in batches] == [2, 2, 2]
    assert set.union(*batches) == {0, 1, 2, 3, 4, 5}, "each step has other tasks, until all were used"
    assert numbers(run.tasks("validation")) == {10, 11}
    assert numbers(run.tasks("before")) == numbers(run.tasks("after")) == {20, 21}


async def test_the_best_checkpoint_by_validation_is_measured_and_kept(run: Run) -> None:
    """Weights of two updates are the best: worse weights come before and after."""
    run.policy = ScriptedPolicy(lambda messages, updates: str([0.1, 0.3, 0.9, 0.2][updates]))
    run.reward = lambda task, answer: float(answer) + (task["n"] % 2) / 100
    result = await run.fit(
        greedy(every=1), LightningRL(steps=3, tasks_per_step=2, group_size=2, credit="reinforce"), **TASKS
    )
    assert [record["validation_greedy"] for record in run.metrics] == pytest.approx([0.305, 0.905, 0.205])
    assert (result.best_step, result.steps) == (2, 3)
    assert scripted_weights(result.checkpoint)["updates"] == 2
    assert result.held_out["greedy"].after == pytest.approx(0.905), "the best weights are loaded to be measured"
    assert result.held_out["greedy"].before == pytest.approx(0.105)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_rollouts_of_the_next_step_are_queued_before_the_update_where_they_may_be_stale(
    run: Run, max_staleness: int
) -> None:
    run.reward = lambda task, answer: 1.0
    config = greedy(every=0).model_copy(update={"run": RunConfig(max_staleness=max_staleness)})
    await run.fit(config, LightningRL(steps=3, tasks_per_step=1, group_size=2, credit="reinforce"), **TASKS)
    name = next(rollout_id for rollout_id, _ in run.rollouts if "train" in rollout_id).partition("-train")[0]
    published = [await run.store.get_resources_by_id(f"{name}-train-{step:06d}") for step in range(3)]
    versions = [update and update.resources["llm"].policy_version for update in published]
    assert versions == ([0, 0, 1] if max_staleness else [0, 1, 2])
    assert await run.store.get_resources_by_id(f"{name}-train-000003") is None


async def test_greedy_and_sampled_evaluations_differ_in_temperature(run: Run) -> None:
    config = TrainConfig(evaluation=EvaluationConfig(every=1))
    await run.fit(config, LightningRL(steps=1, tasks_per_step=1, group_size=2, temperature=0.7), **TASKS)
    for purpose in ("before", "validation-000001", "after-000001"):
        assert run.temperatures(f"{purpose}-greedy") == {0.0}
        assert run.temperatures(f"{purpose}-sampled") == {1.0}
    assert run.temperatures("train-") == {0.7}


async def test_automatic_rewards_reach_the_credit_of_calls_and_the_metrics(run: Run) -> None:
    @air_rule
    def says_yes(span: Any) -> float | None:
        return 1.0 if span.attributes.get("gen_ai.operation.name") == "chat" else None

    run.reward = lambda task, answer: 1.0
    run.policy = ScriptedPolicy(lambda messages, updates: "yes")
    credit = {"type": "discounted", "gamma": 1.0}
    config = greedy(every=0).model_copy(update={"air": {"says_yes": 0.25}})
    result = await run.fit(config, LightningRL(steps=1, tasks_per_step=1, group_size=2, credit=credit), **TASKS)
    assert (run.metrics[0]["air_says_yes"], run.metrics[0]["air_reward"], run.metrics[0]["reward"]) == (0.25, 0.25, 1.0)
    assert result.held_out["greedy"].before == 1.0, "evaluations measure the final reward alone"


async def test_automatic_rewards_that_a_credit_rule_would_ignore_are_refused(run: Run) -> None:
    @air_rule
    def each_call(span: Any) -> float | None:
        return 1.0 if span.attributes.get("gen_ai.operation.name") == "chat" else None

    config = greedy(every=0).model_copy(update={"air": {"each_call": 0.25}})
    with pytest.raises(TrainingStopped, match="intermediate reward, which credit rule"):
        await run.fit(config, LightningRL(steps=1, tasks_per_step=2, group_size=2), **TASKS)


async def test_the_curriculum_draws_the_tasks_that_teach_something(run: Run) -> None:
    """Rewards reach it through the reward weights, and its counts reach the metrics."""
    rewards = iter([0.0, 1.0] * 99)
    run.reward = lambda task, answer: {"right": next(rewards) if task["n"] == 3 else 1.0, "style": task["n"]}
    algorithm = LightningRL(steps=9, tasks_per_step=1, group_size=2, reward_weights={"right": 1.0, "style": 0.0})
    curriculum = CurriculumConfig(tasks="learnability", untried_share=1.0, staleness_share=0.0)
    await run.fit(greedy(every=0).model_copy(update={"curriculum": curriculum}), algorithm, **TASKS)
    steps = [numbers(run.tasks(f"train-{step:06d}")) for step in range(9)]
    assert set.union(*steps[:6]) == {0, 1, 2, 3, 4, 5}, "every task is tried first"
    assert steps[6:] == [{3}] * 3, "the only one whose rollouts differ"
    assert run.metrics[-1]["curriculum_tasks_tried"] == 6
    assert run.metrics[-1]["curriculum_tasks_with_spread"] == 1


async def test_epochs_are_the_default_curriculum(run: Run) -> None:
    await run.fit(greedy(every=0), LightningRL(steps=3, tasks_per_step=2, group_size=2), **TASKS)
    assert "curriculum_tasks_tried" not in run.metrics[-1]
