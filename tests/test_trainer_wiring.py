"""Whole runs with a scripted policy: what was configured reaches the part that uses it.

The store, the gateway, the server, the rollout source, the run directory and the algorithm are the real ones. The
scripted policy stands in for the model, and a coroutine of the test for the runner and its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.scripted_policy import ScriptedPolicy, scripted_weights

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.sft import SFTAlgorithm
from agentlightning.attempt_address import attempt_key, attempt_path, attempt_secret
from agentlightning.config import CurriculumConfig, EvaluationConfig, GateConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.dashboard.data.run_data import catalog_of_run
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.rollout import show_tokens
from agentlightning.dashboard.views.rollouts import list_rollouts
from agentlightning.dashboard.views.runs import list_resources, list_weights
from agentlightning.errors import TrainingStopped
from agentlightning.policy import open as opening
from agentlightning.policy.base import UPDATE, UpdateOptions
from agentlightning.policy.config import OptimizerConfig, PolicyConfig
from agentlightning.policy.losses import NLLLoss, PPOLoss
from agentlightning.resources import ProxyLLM
from agentlightning.rollouts import AttemptedRollout
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracing.air import air_rule
from agentlightning.trainer import Trainer
from agentlightning.training import tracking
from agentlightning.training.persistence import checkpoints as checkpoints_module
from agentlightning.training.persistence.checkpoints import Checkpoints
from agentlightning.training.report.result import TrainingResult

pytestmark = pytest.mark.integration

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
        monkeypatch.setattr(tracking, "draw_curve", lambda *_: None)

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
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
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
        """The tasks of the rollouts that were made for a purpose: `train-000001`, `validation`, `before-greedy` ..."""
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
    assert options.loss == PPOLoss(clip_low=0.1)
    assert (options.minibatches, options.token_budget) == (3, 123)
    optimizer = run.policy_config.optimizer
    assert (optimizer.betas, optimizer.weight_decay, optimizer.schedule) == ((0.7, 0.8), 0.1, "linear")
    assert optimizer.total_steps == 2 * 3, "the schedule ends with the run"
    assert result.held_out["greedy"].before == 0.5 + 7.0 - 0.25, "reward_weights hold for evaluations, too"


async def test_supervised_learning_trains_by_its_own_settings(run: Run) -> None:
    conversation = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "yes"}]
    algorithm = SFTAlgorithm(dataset=[conversation] * 4, batch_size=2, epochs=3, token_budget=77)
    await run.fit(greedy(every=0), algorithm, **TASKS)
    assert [update.options for update in run.policy.recorded] == [UpdateOptions(loss=NLLLoss(), token_budget=77)] * 6
    assert (run.policy_config.optimizer.total_steps, run.policy_config.objective) == (6, "supervised")


async def test_every_part_of_the_tasks_is_used_for_its_own_purpose(run: Run) -> None:
    await run.fit(greedy(every=1), LightningRL(steps=3, tasks_per_step=2, group_size=2), **TASKS)
    batches = [numbers(run.tasks(f"train-{step:06d}")) for step in (1, 2, 3)]
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
    data = catalog_of_run(result.run_dir, run.store)
    own = await data.run("run")
    shown = await list_rollouts(own, Query({"limit": "500", "id": "-after-"}))
    assert {row.versions for row in shown["rows"]} == {(2,)}, "by the dashboard, two updates: loading is none"
    tokens = await show_tokens(own, Query({"rollout": shown["rows"][0].rollout_id}))
    assert [call["version"] for call in tokens["stream"]] == [2]
    weights = await list_weights(own, Query())
    assert {each["version"] for each in weights["records"]} <= {0, 1, 2, 3}, "three steps have no fourth version"
    resources = await list_resources(own, Query())
    models = [each["resources"]["llm"] for each in resources["versions"]]
    assert {model["policy_version"] for model in models} == {0, 1, 2, 3}
    await data.close()


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_rollouts_of_the_next_step_are_queued_before_the_update_where_they_may_be_stale(
    run: Run, max_staleness: int
) -> None:
    run.reward = lambda task, answer: 1.0
    config = greedy(every=0).model_copy(update={"run": RunConfig(max_staleness=max_staleness)})
    await run.fit(config, LightningRL(steps=3, tasks_per_step=1, group_size=2, credit="reinforce"), **TASKS)
    name = next(rollout_id for rollout_id, _ in run.rollouts if "train" in rollout_id).partition("-train")[0]
    published = [await run.store.get_resources_by_id(f"{name}-train-{step:06d}") for step in (1, 2, 3)]
    versions = [update and update.resources["llm"].policy_version for update in published]
    assert versions == ([0, 0, 1] if max_staleness else [0, 1, 2])
    assert await run.store.get_resources_by_id(f"{name}-train-000004") is None


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
    steps = [numbers(run.tasks(f"train-{step:06d}")) for step in range(1, 10)]
    assert set.union(*steps[:6]) == {0, 1, 2, 3, 4, 5}, "every task is tried first"
    assert steps[6:] == [{3}] * 3, "the only one whose rollouts differ"
    assert run.metrics[-1]["curriculum_tasks_tried"] == 6
    assert run.metrics[-1]["curriculum_tasks_with_spread"] == 1


async def test_epochs_are_the_default_curriculum(run: Run) -> None:
    await run.fit(greedy(every=0), LightningRL(steps=3, tasks_per_step=2, group_size=2), **TASKS)
    assert "curriculum_tasks_tried" not in run.metrics[-1]


class Collapsing(ScriptedPolicy):
    """From its eighth update on, a policy whose gradient grows and whose entropy falls, unless `is_mended` at this
    factor of the learning rate."""

    def __init__(self, is_mended: Callable[[float], bool] = lambda factor: factor < 1) -> None:
        super().__init__(lambda messages, updates: "yes")
        self.is_mended = is_mended

    async def train(self, samples: Any, options: UpdateOptions = UPDATE, **more: Any) -> dict[str, float]:
        metrics = await super().train(samples, options, **more)
        breaks = self.updates >= 8 and not self.is_mended(options.lr_factor)
        return {**metrics, "grad_norm": 3.0 if breaks else 1.0, "entropy": 0.1 if breaks else 1.0}


def on_collapse(action: str, **settings: Any) -> TrainConfig:
    return greedy(every=0).model_copy(update={"run": RunConfig.model_validate({"on_collapse": action, **settings})})


def reinforce(run: Run, steps: int) -> LightningRL:
    run.reward = lambda task, answer: task["n"] / 100
    return LightningRL(steps=steps, tasks_per_step=2, group_size=2, credit="reinforce")


async def resume(run: Run, changes: dict[str, Any]) -> TrainingResult:
    run.policy = Collapsing()
    async with run._agents():
        return await Trainer.resume(run.directory / "run", changes=changes, store=run.store).fit_async()


async def test_weights_that_lose_on_the_guard_set_are_replaced_by_the_promoted_ones(run: Run) -> None:
    """Weights of three updates and more are worse. The run goes on from those of the second step."""
    run.policy = ScriptedPolicy(lambda messages, updates: "0.1" if updates >= 3 else "0.9")
    run.reward = lambda task, answer: float(answer)
    guard_set = {**TASKS, "val_dataset": [{"n": n} for n in range(100, 112)]}
    config = greedy(every=0).model_copy(update={"gate": GateConfig(every=2)})
    result = await run.fit(
        config, LightningRL(steps=4, tasks_per_step=2, group_size=2, credit="reinforce"), **guard_set
    )
    assert [line.get("gate_promoted") for line in run.metrics] == [None, 1.0, None, 0.0]
    assert (result.best_step, result.gate_rejections) == (2, 1)
    assert scripted_weights(result.checkpoint)["updates"] == 2
    assert result.held_out["greedy"].after == pytest.approx(0.9)
    assert {task["n"] for task in run.tasks("guard-000000-")} == set(range(100, 112)), "the start is measured too"


async def test_a_collapse_is_warned_of_once_counted_and_otherwise_left_alone_by_default(run: Run) -> None:
    run.policy = Collapsing()
    result = await run.fit(on_collapse("warn"), reinforce(run, 11), **TASKS)
    [warning] = [each for each in result.warnings if "begins to collapse" in each]
    assert warning.startswith("step 9: ")
    assert "run.on_collapse" in warning, "it says what to try"
    assert (result.warning_counts["echo_trap"], result.rollbacks) == (3, 0)
    assert scripted_weights(result.checkpoint)["updates"] == 11
    report = json.loads((run.directory / "run" / "report.json").read_text())
    assert report["warning_counts"]["echo_trap"] == 3


async def test_a_run_rolls_back_from_a_collapse_with_a_lower_learning_rate_that_survives_a_resume(run: Run) -> None:
    policy = run.policy = Collapsing()
    result = await run.fit(on_collapse("rollback", rollback_lr_factor=0.5), reinforce(run, 11), **TASKS)
    assert (result.steps, result.rollbacks) == (11, 1)
    [rolled_back] = [line for line in run.metrics if line.get("rolled_back")]
    assert [rolled_back[name] for name in ("step", "returned_to_step", "lr_factor")] == [9, 0, 0.5]
    assert scripted_weights(result.checkpoint)["updates"] == 2, "two updates of the weights it began with"
    factors = [update.options.lr_factor for update in policy.recorded]
    assert factors == [1.0] * 9 + [0.5] * 2
    resumed = await resume(run, {"algorithm.steps": 13})
    assert (resumed.steps, resumed.rollbacks) == (13, 1)
    assert isinstance(run.policy, Collapsing)
    assert [update.options.lr_factor for update in run.policy.recorded] == [0.5, 0.5]


async def test_a_run_that_goes_on_collapsing_stops_after_its_last_rollback(run: Run) -> None:
    run.policy = Collapsing(is_mended=lambda factor: False)
    with pytest.raises(TrainingStopped, match=r"after 1 rollbacks \(run.max_rollbacks\).*--resume"):
        await run.fit(on_collapse("rollback", max_rollbacks=1), reinforce(run, 30), **TASKS)
    assert [line["step"] for line in run.metrics if line.get("rolled_back") or line.get("stopped")] == [9, 18]


async def test_a_run_that_a_collapse_has_stopped_continues_from_its_healthy_weights(run: Run) -> None:
    run.policy = Collapsing()
    with pytest.raises(TrainingStopped, match=r'step 9: the policy begins to collapse(.|\n)*run.on_collapse = "stop"'):
        await run.fit(on_collapse("stop"), reinforce(run, 11), **TASKS)
    assert run.metrics[-1]["stopped"] == 1
    resumed = await resume(run, {})
    assert resumed.steps == 11
    assert scripted_weights(resumed.checkpoint)["updates"] == 2
    kept = {path.name for path in (run.directory / "run" / "checkpoints").glob("step-*")}
    assert "step-000000" in kept, "what may be returned to is kept"


@pytest.mark.parametrize(("every", "written"), [(None, [1, 5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])])
async def test_slow_checkpoints_are_rare_unless_the_settings_say_how_many(
    every: int | None, written: list[int], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_module, "SLOW_CHECKPOINT", 0.0)
    monkeypatch.setattr(checkpoints_module, "CHECKPOINT_SHARE", 1e9)
    steps: list[int] = []
    write = Checkpoints.write

    async def counted(checkpoints: Checkpoints, step: int) -> str:
        steps.append(step)
        return await write(checkpoints, step)

    monkeypatch.setattr(Checkpoints, "write", counted)
    config = TrainConfig(run=RunConfig(checkpoint_every=every), evaluation=EvaluationConfig(every=0))
    result = await run.fit(config, reinforce(run, 5), **TASKS)
    assert (result.steps, steps) == (5, written)
    assert json.loads((run.directory / "run" / "state.json").read_text())["step"] == 5


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda task, answer: float(answer == "yes."), "every rollout since the first step has the reward 0"),
        (lambda task, answer: 0.0, "does not see what differs"),
    ],
)
async def test_a_reward_that_is_always_zero_for_its_format_is_named_as_the_cause(
    run: Run, reward: Reward, words: str
) -> None:
    counter = iter(range(10**6))
    run.policy = ScriptedPolicy(lambda messages, updates: f"yes, I say {next(counter)}")
    run.reward = reward
    result = await run.fit(greedy(every=0), LightningRL(steps=3, tasks_per_step=4, group_size=2), **TASKS)
    [warning] = [each for each in result.warnings if "taught nothing" in each]
    assert words in warning


async def test_outputs_that_are_repeated_and_not_sampled_are_named_as_the_cause(run: Run) -> None:
    """Scripted answers have the log-probability of a sampled text, and are always the same: as with a fixed seed."""
    run.policy = ScriptedPolicy(lambda messages, updates: "a text so long that it would never come twice by chance")
    result = await run.fit(greedy(every=0), LightningRL(steps=2, tasks_per_step=4, group_size=4), **TASKS)
    [warning] = [each for each in result.warnings if "too improbable to be chance" in each]
    assert "caches answers" in warning


async def test_an_automatic_reward_that_is_exploited_is_found(run: Run) -> None:
    """The rule rewards long answers. They grow with each update, and the final reward falls."""

    @air_rule
    def long_answer(span: Any) -> float | None:
        tokens = span.attributes.get("gen_ai.usage.output_tokens")
        return None if tokens is None else tokens / 100

    run.policy = ScriptedPolicy(lambda messages, updates: "more " * (updates + 1))
    noise = random.Random(0)
    run.reward = lambda task, answer: 1 - len(answer) / 100 + noise.uniform(0, 0.01)
    credit = {"type": "discounted", "gamma": 1.0}
    config = greedy(every=0).model_copy(update={"air": {"long_answer": 1.0}})
    result = await run.fit(config, LightningRL(steps=12, tasks_per_step=2, group_size=2, credit=credit), **TASKS)
    [warning] = [each for each in result.warnings if "probably exploited" in each]
    assert "intermediate rewards rose" in warning
    assert "while the final reward fell" in warning


async def test_a_dimension_that_is_exploited_at_the_cost_of_another_is_found(run: Run) -> None:
    run.policy = ScriptedPolicy(lambda messages, updates: "yes" + "!" * updates)
    run.reward = lambda task, answer: {"style": answer.count("!") / 5, "right": 1 / len(answer) + task["n"] / 1000}
    algorithm = LightningRL(
        steps=12, tasks_per_step=2, group_size=2, credit="reinforce", reward_weights={"style": 1.0, "right": 1.0}
    )
    result = await run.fit(greedy(every=0), algorithm, **TASKS)
    assert [each for each in result.warnings if "while 'right' fell" in each]


async def test_only_the_groups_that_differ_most_are_learned_from(run: Run) -> None:
    rewards = iter([0.0, 1.0] * 99)
    run.reward = lambda task, answer: next(rewards) * (1.0 if task["n"] == 3 else 0.1)
    algorithm = LightningRL(steps=1, tasks_per_step=6, group_size=2, keep_groups=0.1)
    await run.fit(greedy(every=0), algorithm, **TASKS)
    (step,) = run.metrics
    assert (step["groups_filtered"], step["groups_trained"]) == (5, 1)
    trained = {node.rollout_id for each in run.policy.recorded[0].samples for node in each.tree.nodes if node.sampled}
    assert trained == {name for name, task in run.rollouts if task["n"] == 3 and "train" in name}
