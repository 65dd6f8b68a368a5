"""Whole runs of `agl.Sequential`: prompts and weights in one run, with one gate, one rollback and one result.

Store, gateway, server, prompt search, run directory and trainer are the real ones. A scripted policy stands in for the
model, an HTTP server of `agentlightning.testing` for critic and editor, a coroutine for the runner and its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.prompt_worlds import PromptWorld, PromptWorldServer
from tests.support.scripted_policy import ScriptedPolicy, scripted_weights

import agentlightning as agl
from agentlightning.algorithms.preference import DPO
from agentlightning.algorithms.training import Collected
from agentlightning.attempt_address import attempt_key, attempt_path, attempt_secret
from agentlightning.policy import open as opening
from agentlightning.training import tracking
from agentlightning.training.governance import read_audit
from agentlightning.training.persistence.run_dir import changed_settings, check_changes
from agentlightning.training.report.result import as_html, markdown_report
from agentlightning.util.settings import dump_toml, load_settings

pytestmark = pytest.mark.integration

START = "Answer.\nNumber {n}."
KIND = "Be kind."
TASKS = {
    "train_dataset": [{"n": n} for n in range(8)],
    "val_dataset": [{"n": n} for n in range(100, 112)],
    "held_out_dataset": [{"n": n} for n in range(200, 216)],
}


def quality(messages: list[Any], updates: int) -> str:
    """The prompt is worth 0.3, each of the first four updates 0.1."""
    return f"{0.2 + 0.3 * (KIND in messages[-1]['content']) + 0.1 * min(updates, 4):.1f}"


class Publishes(agl.Algorithm):
    """Publishes one prompt at each step, good or bad."""

    learns_weights = False

    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts

    @property
    def total_steps(self) -> int:
        return len(self.prompts)

    async def run(self, training: agl.Training) -> None:
        while training.step < self.total_steps:
            await training.publish({"prompt": agl.PromptTemplate(template=self.prompts[training.step])})
            collected = await training.collect(tasks=2, group_size=2, temperature=1.0)
            await training.finish_step(collected, {})


class Crash(Exception):
    pass


class Run:
    """One run, and what was observed of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, server: PromptWorldServer) -> None:
        self.store, self.directory, self.server = agl.InMemoryLightningStore(), directory, server
        self.policy = ScriptedPolicy(quality)
        self.policy_config: Any = None
        self.reward: Callable[[Any, str], float] = lambda task, answer: float(answer)
        self.seen: list[tuple[str, str]] = []
        """(rollout id, its prompt) of each rollout, in the order in which they ran."""

        async def open_policy(config: Any) -> ScriptedPolicy:
            self.policy_config = config
            return self.policy

        monkeypatch.setattr(opening, "open_policy", open_policy)
        monkeypatch.setattr(tracking, "draw_curve", lambda *_: None)

    def apo(self, **settings: Any) -> agl.APO:
        models = {part: {"model": part, "base_url": self.server.url} for part in ("critic", "editor")}
        return agl.APO(**{**models, "budget": {"calls": 60}, "patience": 2, **settings})

    def trainer(self, algorithm: agl.Algorithm[Any], **settings: Any) -> agl.Trainer:
        config = agl.TrainConfig(
            **{
                "evaluation": agl.config.EvaluationConfig(every=0, modes=("greedy",)),
                "policy": agl.config.PolicyConfig(model=str(self.directory)),
                "runner": agl.config.RunnerConfig(hosts=0, max_attempts=1),
                **settings,
            }
        )
        return agl.Trainer(
            config,
            algorithm=algorithm,
            store=self.store,
            run_dir=self.directory / "run",
            initial_resources={"prompt": agl.PromptTemplate(template=START)},
        )

    async def fit(self, algorithm: agl.Algorithm[Any], **settings: Any) -> agl.TrainingResult:
        async with self.agents():
            return await self.trainer(algorithm, **settings).fit_async(**TASKS)

    async def resume(self, algorithm: agl.Algorithm[Any] | None = None, **changes: Any) -> agl.TrainingResult:
        options = {} if algorithm is None else {"algorithm": algorithm}
        made = agl.Trainer.resume(self.directory / "run", store=self.store, changes=changes, **options)
        async with self.agents():
            return await made.fit_async()

    @contextlib.asynccontextmanager
    async def agents(self) -> AsyncIterator[None]:
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
                await self._run(client, rollout)

    async def _run(self, client: httpx.AsyncClient, rollout: agl.AttemptedRollout) -> None:
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        update = await self.store.get_resources_by_id(rollout.resources_id or "")
        assert update is not None
        llm, prompt = update.resources["llm"], update.resources["prompt"]
        assert isinstance(llm, agl.ProxyLLM)
        assert isinstance(prompt, agl.PromptTemplate)
        self.seen.append((ids[0], prompt.template))
        messages = [{"role": "user", "content": prompt.format(**rollout.input)}]
        url = f"{llm.get_base_url(*ids)}/chat/completions"
        reply = await client.post(url, json={"model": llm.model, "messages": messages})
        answer = reply.json()["choices"][0]["message"]["content"]
        event = {"event_type": "reward", "data": {"value": self.reward(rollout.input, answer)}}
        key = {"authorization": f"Bearer {attempt_key(attempt_secret(None), *ids)}"}
        reply = await client.post(f"{llm.root_url}{attempt_path(*ids)}/events", json=event, headers=key)
        reply.raise_for_status()
        await self.store.update_attempt(*ids, status="succeeded", metadata={"output": answer})

    def prompts(self, purpose: str) -> set[str]:
        """Those of the rollouts that were made for a purpose."""
        return {prompt for rollout_id, prompt in self.seen if purpose in rollout_id}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "run" / "metrics.jsonl").read_text().splitlines()]

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.directory / "run" / "state.json").read_text())


@pytest.fixture(scope="module")
def server() -> Iterator[PromptWorldServer]:
    with PromptWorldServer(PromptWorld(0)) as running:
        edit = {"edits": [{"op": "add", "after": 1, "text": KIND}]}
        running.models["critic"] = lambda text: "The answers are unkind."
        running.models["editor"] = lambda text: json.dumps({"edits": []} if f"] {KIND}" in text else edit)
        yield running


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: PromptWorldServer) -> AsyncIterator[Run]:
    made = Run(monkeypatch, tmp_path, server)
    yield made
    await made.store.close()


def learn(steps: int = 4, **settings: Any) -> agl.LightningRL:
    return agl.LightningRL(steps=steps, tasks_per_step=2, group_size=2, credit="reinforce", **settings)


BETTER = f"Answer.\n{KIND}\nNumber {{n}}."


# -- prompts, then weights ---------------------------------------------------------------------------------------------


async def test_prompts_then_weights_is_one_run_whose_stages_each_show_their_gain(run: Run) -> None:
    result = await run.fit(agl.Sequential([run.apo(), learn()]))
    first, second = result.stages
    assert (first.name, second.name) == ("apo", "lightning_rl")
    assert first.held_out["greedy"].gain == pytest.approx(0.3)
    assert second.held_out["greedy"].gain == pytest.approx(0.4)
    assert result.held_out["greedy"].gain == pytest.approx(0.7)
    assert first.held_out["greedy"].after == second.held_out["greedy"].before == pytest.approx(0.5)
    assert all(stage.held_out["greedy"].interval[0] > 0 for stage in result.stages)
    assert (result.best_prompt.template, result.diff().splitlines()[-2]) == (BETTER, f"+{KIND}")
    assert scripted_weights(result.checkpoint)["updates"] == 4
    saved = json.loads((result.checkpoint / "resources.json").read_text())
    assert saved["prompt"]["template"] == BETTER, "the artefact has the prompts and the weights"
    assert result.steps == first.steps + second.steps == second.first_step + 4
    assert result.rollouts == first.rollouts + second.rollouts
    lines = run.metrics
    assert [line["step"] for line in lines] == list(range(1, result.steps + 1))
    assert [line["stage"] for line in lines] == [1] * first.steps + [2] * 4
    assert [each["held_out"]["greedy"]["gain"] for each in result.as_json()["stages"]] == pytest.approx([0.3, 0.4])


async def test_the_prompt_that_was_found_reaches_the_rollouts_that_weights_learn_from_and_no_other(run: Run) -> None:
    result = await run.fit(agl.Sequential([run.apo(), learn()]))
    assert run.prompts("-train-") == {BETTER}
    assert run.prompts("-trial-") == {START, BETTER}, "the search had the policy, too"
    learned = [name for record in read_audit(result.run_dir) for name in record.rollouts]
    assert len(learned) == 16
    assert all("-train-" in name for name in learned), "what a search tried is not learned from"
    nodes = [node for update in run.policy.recorded for sample in update.samples for node in sample.tree.nodes]
    learned_text = "".join(run.policy.chat.decode(node.token_ids) for node in nodes)
    assert learned_text.count(KIND) == learned_text.count("Answer.") > 0
    assert run.server.calls["critic"] > 0
    spans = [span async for _, found in run.store.iter_spans([name for name, _ in run.seen]) for span in found]
    models = {span.attributes.get("gen_ai.request.model") for span in spans}
    assert models - {None} == {"policy"}, "calls of critic and editor belong to no rollout"


async def test_a_search_decodes_as_the_result_is_measured(run: Run) -> None:
    sampled = agl.config.EvaluationConfig(every=0, modes=("sampled", "greedy"))
    await run.fit(agl.Sequential([run.apo(), learn(1)]), evaluation=sampled)
    rollouts = await run.store.query_rollouts(rollout_id_contains="-trial-")
    update = await run.store.get_resources_by_id(rollouts[0].resources_id or "")
    assert update is not None
    assert update.resources["llm"].sampling_parameters == {"temperature": 1.0}


async def test_the_report_shows_each_stage_and_what_it_cost(run: Run) -> None:
    priced = {part: {"model": part, "base_url": run.server.url, "input_price": 1e6} for part in ("critic", "editor")}
    result = await run.fit(agl.Sequential([run.apo(**priced), learn()]))
    text = await markdown_report(result.run_dir, 1, run.store)
    assert "| 1 apo | greedy | 0.200 | 0.500 | +0.300 |" in text
    assert "| 2 lightning_rl | greedy | 0.500 | 0.900 | +0.400 |" in text
    assert "| greedy | 0.200 | 0.900 | +0.700 |" in text
    cost = result.cost
    last = run.metrics[-5]
    assert (cost.search_calls, cost.search_tokens) == (last["apo_model_calls"], last["apo_tokens"])
    assert cost.search_money == pytest.approx(last["apo_money"])
    assert f"| money of the prompt search | {cost.search_money:.4f} |" in text
    assert cost.sampled_tokens == result.stages[1].cost.sampled_tokens > 0
    page = as_html(text)
    assert page.count("<table>") == page.count("</table>") >= 4
    assert "<td>2 lightning_rl</td>" in page


async def test_a_price_that_is_not_set_is_said_to_be_unknown(run: Run) -> None:
    result = await run.fit(agl.Sequential([run.apo(), learn(1)]))
    assert result.cost.search_money is None
    assert "unknown, no price is set" in await markdown_report(result.run_dir, 0, run.store)


async def test_the_schedule_of_the_learning_rate_is_that_of_the_weights_alone(run: Run) -> None:
    await run.fit(agl.Sequential([run.apo(), learn(3, minibatches=2)], rounds=2))
    assert run.policy_config.optimizer.total_steps == 12


async def test_weights_that_do_not_change_are_not_saved_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Path] = []
    save = run.policy.save

    async def counted(directory: Path, *, training_state: bool = False) -> None:
        saved.append(directory)
        await save(directory, training_state=training_state)

    monkeypatch.setattr(run.policy, "save", counted)
    config = agl.config.RunConfig(keep_checkpoints=99)
    result = await run.fit(agl.Sequential([run.apo(), learn(2)]), run=config)
    searched = result.stages[0].steps
    assert searched > 1
    assert len(saved) == 1 + 2 + 1, "once in the search, once for each update, once as the result"
    found = [result.run_dir / "checkpoints" / f"step-{step:06d}" for step in range(1, searched + 3)]
    assert [scripted_weights(each)["updates"] for each in found] == [0] * searched + [1, 2]


# -- other orders ------------------------------------------------------------------------------------------------------


async def test_rounds_repeat_the_list_from_the_prompts_and_weights_so_far(run: Run) -> None:
    result = await run.fit(agl.Sequential([Publishes(f"1 {START}", f"2 {START}"), learn(1)], rounds=2))
    assert [stage.name for stage in result.stages] == ["Publishes", "lightning_rl"] * 2
    assert [stage.first_step for stage in result.stages] == [0, 2, 3, 5]
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert scripted_weights(result.checkpoint)["updates"] == 2
    gains = [round(stage.held_out["greedy"].gain, 2) for stage in result.stages]
    assert gains == [0.0, 0.1, 0.0, 0.1]


async def test_each_stage_of_weights_leaves_its_best_validated_checkpoint(run: Run) -> None:
    """Its second step is the best. The prompts that come after begin with the weights of that step."""
    worth = (0.1, 0.3, 0.5, 0.2)
    run.policy = ScriptedPolicy(
        lambda messages, updates: f"{worth[updates] + 0.3 * (KIND in messages[-1]['content']):.1f}"
    )
    evaluation = agl.config.EvaluationConfig(every=1, modes=("greedy",))
    result = await run.fit(agl.Sequential([learn(3), Publishes(BETTER)]), evaluation=evaluation)
    assert [round(stage.held_out["greedy"].after, 2) for stage in result.stages] == [0.5, 0.8]
    assert scripted_weights(result.checkpoint)["updates"] == 2
    assert (result.best_prompt.template, result.held_out["greedy"].after) == (BETTER, pytest.approx(0.8))


async def test_no_rollout_of_an_earlier_stage_is_learned_from_in_a_later_one(run: Run) -> None:
    stages = [learn(3), Publishes(f"new {START}"), learn(3)]
    result = await run.fit(agl.Sequential(stages), run=agl.config.RunConfig(max_staleness=2))
    turns = {name.split("-train-")[1][:6]: prompt for name, prompt in run.seen if "-train-" in name}
    assert set(turns) == {f"{turn:06d}" for turn in range(1, 8)}, "as many as steps, none ahead of a stage"
    assert {turns[f"{turn:06d}"] for turn in (4, 5, 6)} == {f"new {START}"}
    assert result.rollouts == 7 * 4


async def test_the_starting_weights_are_known_to_a_stage_after_a_search(run: Run) -> None:
    preference = DPO(steps=1, tasks_per_step=1, group_size=2)
    asked: list[Path | None] = []

    class Asks(Publishes):
        learns_weights = True

        async def run(self, training: agl.Training) -> None:
            asked.append(await training.starting_weights())
            await super().run(training)

    await run.fit(agl.Sequential([Publishes(START), Asks(START), preference]))
    assert asked[0] is not None
    assert scripted_weights(asked[0])["updates"] == 0


# -- the gate ----------------------------------------------------------------------------------------------------------


async def test_the_gate_stops_a_planted_regression_of_prompts_and_one_of_weights(run: Run) -> None:
    """The second prompt is unkind; weights of three updates and more are worse."""
    run.policy = ScriptedPolicy(lambda messages, updates: quality(messages, 2 - updates if updates >= 3 else updates))
    stages = agl.Sequential([Publishes(BETTER, START), learn(4)])
    result = await run.fit(stages, gate=agl.config.GateConfig(every=1))
    assert [line["gate_promoted"] for line in run.metrics] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert result.gate_rejections == 3
    assert run.prompts("-train-000003") == {BETTER}, "weights begin with the promoted prompt"
    assert (result.best_step, result.best_prompt.template) == (4, BETTER)
    assert scripted_weights(result.checkpoint)["updates"] == 2
    saved = json.loads((result.checkpoint / "resources.json").read_text())
    assert saved["prompt"]["template"] == BETTER
    assert [round(stage.held_out["greedy"].after, 2) for stage in result.stages] == [0.5, 0.7]


async def test_a_rollback_in_the_second_stage_brings_back_prompts_and_weights(run: Run) -> None:
    """One step changes both at once, and is rejected."""

    class Both(Publishes):
        learns_weights = True

        async def run(self, training: agl.Training) -> None:
            run.policy.updates, run.policy.policy_version = run.policy.updates + 1, run.policy.policy_version + 1
            await super().run(training)

    run.policy = ScriptedPolicy(lambda messages, updates: "0.9" if KIND in messages[-1]["content"] else "0.1")
    result = await run.fit(agl.Sequential([Publishes(BETTER), Both(START)]), gate=agl.config.GateConfig(every=1))
    assert result.gate_rejections == 1
    assert (run.policy.updates, result.best_prompt.template) == (0, BETTER)
    assert run.prompts("-after-") == {BETTER}


async def test_prompts_that_the_run_began_with_come_back_too(run: Run) -> None:
    run.policy = ScriptedPolicy(lambda messages, updates: "0.1" if KIND in messages[-1]["content"] else "0.9")
    result = await run.fit(agl.Sequential([Publishes(BETTER), learn(1)]), gate=agl.config.GateConfig(every=1))
    assert result.gate_rejections == 1
    assert run.prompts("-train-000002") == {START}
    assert result.diff() == ""


async def test_the_gate_stops_a_planted_reward_hack_of_prompts_and_one_of_weights(run: Run, tmp_path: Path) -> None:
    """The reward counts characters. A prompt that asks for more of them exploits it, and so do later weights."""
    (tmp_path / "honest.py").write_text("def short(output):\n    return float(len(output) < 20)\n")

    def wordy(messages: list[Any], updates: int) -> str:
        return "x" * (10 + 40 * ("at length" in messages[-1]["content"]) + 40 * (updates >= 2))

    run.policy = ScriptedPolicy(wordy)
    run.reward = lambda task, answer: len(answer) / 100
    stages = [Publishes(f"Answer at length.\n{START}"), learn(3)]
    honest = agl.config.GateConfig(every=1, reward=f"{tmp_path / 'honest.py'}:short")
    result = await run.fit(agl.Sequential(stages), gate=honest)
    assert [line["gate_promoted"] for line in run.metrics] == [0.0, 1.0, 0.0, 0.0]
    assert (result.gate_rejections, result.diff()) == (3, "")
    assert scripted_weights(result.checkpoint)["updates"] == 1
    run.directory, run.policy = tmp_path / "blind", ScriptedPolicy(wordy)
    blind = await run.fit(agl.Sequential(stages), gate=agl.config.GateConfig(every=1))
    assert blind.gate_rejections == 0, "by the reward that they exploit, all are better"


async def test_what_a_search_has_found_is_judged_though_it_ends_before_its_last_round(run: Run) -> None:
    result = await run.fit(agl.Sequential([run.apo(), learn(1)]), gate=agl.config.GateConfig(every=1000))
    promoted = [record.step for record in read_audit(result.run_dir) if record.action == "promoted"]
    assert promoted == [0, result.stages[0].steps, result.steps]
    assert result.best_prompt.template == BETTER


# -- resuming ----------------------------------------------------------------------------------------------------------


def crash_at(run: Run, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The first process ends within this step, after its rollouts."""
    from agentlightning.training.run import TrainingRun

    finish = TrainingRun.finish_step

    async def crashing(self: TrainingRun, collected: Collected, metrics: Any) -> None:
        if self.state.step + 1 == step:
            monkeypatch.setattr(TrainingRun, "finish_step", finish)
            raise Crash
        await finish(self, collected, metrics)

    monkeypatch.setattr(TrainingRun, "finish_step", crashing)


@pytest.mark.parametrize("step", [2, 7, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 4, 6, 8))])
async def test_a_run_that_crashes_in_either_stage_ends_like_an_undisturbed_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int
) -> None:
    run.directory = tmp_path / "calm"
    calm = await run.fit(agl.Sequential([run.apo(), learn()]))
    run.directory, run.policy, run.seen = tmp_path / "rough", ScriptedPolicy(quality), []
    crash_at(run, monkeypatch, step)
    with pytest.raises(Crash):
        await run.fit(agl.Sequential([run.apo(), learn()]))
    run.policy = ScriptedPolicy(quality)
    rough = await run.resume()
    names = [name for name, _ in run.seen]
    assert len(names) == len(set(names)), "no rollout ran twice"
    for name in ("steps", "rollouts", "failed_rollouts", "prompts"):
        assert getattr(rough, name) == getattr(calm, name), name
    assert rough.cost.search_tokens == calm.cost.search_tokens
    assert [(each.name, each.first_step, each.steps, each.rollouts, each.held_out) for each in rough.stages] == [
        (each.name, each.first_step, each.steps, each.rollouts, each.held_out) for each in calm.stages
    ]
    assert scripted_weights(rough.checkpoint)["updates"] == 4
    assert [line["step"] for line in run.metrics] == list(range(1, calm.steps + 1))


async def test_a_crash_between_two_stages_costs_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.training.run import TrainingRun

    measure = TrainingRun.measure_held_out

    async def crashing(self: TrainingRun, phase: str, label: str, purpose: str, **options: Any) -> Any:
        found = await measure(self, phase, label, purpose, **options)
        if label.startswith("stage-"):
            monkeypatch.setattr(TrainingRun, "measure_held_out", measure)
            raise Crash
        return found

    monkeypatch.setattr(TrainingRun, "measure_held_out", crashing)
    with pytest.raises(Crash):
        await run.fit(agl.Sequential([run.apo(), learn()]), gate=agl.config.GateConfig(every=3))
    measured = len(run.seen)
    run.policy = ScriptedPolicy(quality)
    result = await run.resume()
    assert [round(stage.held_out["greedy"].gain, 2) for stage in result.stages] == [0.3, 0.4]
    names = [name for name, _ in run.seen]
    assert len(names) == len(set(names)) > measured


async def test_a_finished_run_goes_on_with_more_steps_of_its_last_stage(run: Run) -> None:
    await run.fit(agl.Sequential([run.apo(), learn(2)]))
    run.policy = ScriptedPolicy(quality)
    result = await run.resume(**{"algorithm.stages.1.steps": 4})
    assert result.stages[1].steps == 4
    assert result.held_out["greedy"].after == pytest.approx(0.9)
    with pytest.raises(agl.errors.ConfigError, match=r"algorithm\.stages\.1\.group_size: a resumed run keeps this"):
        await run.resume(**{"algorithm.stages.1.group_size": 4})


async def test_a_change_of_a_stage_that_is_over_is_warned_of(run: Run) -> None:
    await run.fit(agl.Sequential([run.apo(), learn(1)]))
    run.policy = ScriptedPolicy(quality)
    result = await run.resume(**{"algorithm.stages.0.patience": 9})
    assert any("settings of stage 1 (apo) were changed after it had ended" in text for text in result.warnings)


async def test_a_run_with_stages_of_ones_own_is_resumed_with_the_stages_it_had(run: Run) -> None:
    await run.fit(agl.Sequential([Publishes(BETTER), learn(1)]))
    with pytest.raises(agl.errors.ResumeError, match=r"algorithms\.sequential:Sequential"):
        await run.resume()
    run.policy = ScriptedPolicy(quality)
    with pytest.raises(agl.errors.ResumeError, match="stage 1 of the run was Publishes, not lightning_rl"):
        await run.resume(agl.Sequential([learn(1), Publishes(BETTER)]))
    run.policy = ScriptedPolicy(quality)
    assert (await run.resume(agl.Sequential([Publishes(BETTER), learn(2)]))).steps == 3


# -- supervised stages -------------------------------------------------------------------------------------------------


def demonstrations() -> list[Any]:
    return [[{"role": "user", "content": "Number 1."}, {"role": "assistant", "content": "0.5"}]] * 4


async def test_demonstrations_are_imitated_before_the_rollouts_of_the_same_weights(run: Run) -> None:
    stages = [agl.SFTAlgorithm(dataset=demonstrations(), batch_size=2), learn(2), agl.RejectionSampling(steps=1)]
    result = await run.fit(agl.Sequential(stages))
    assert [(stage.name, stage.steps) for stage in result.stages] == [("sft", 2), ("lightning_rl", 2), ("rejection", 1)]
    updates = [update.options for update in run.policy.recorded]
    assert [options.lr_factor for options in updates] == [10.0, 10.0, 1.0, 1.0, 10.0], "each at its own default"
    assert run.policy_config.objective == "reinforcement"
    assert run.policy_config.optimizer.total_steps == 5
    imitated = [line["imitated"] for line in run.metrics if "imitated" in line]
    assert len(imitated) == 1


# -- what cannot be ----------------------------------------------------------------------------------------------------


def same() -> list[agl.Algorithm[Any]]:
    one = agl.LightningRL()
    return [one, one]


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        (lambda: [], r"Sequential\(\[\]\) has no stage"),
        (lambda: agl.APO(), "the stages are a list of algorithms"),
        (lambda: [agl.APO(), "lightning_rl"], "stage 2 of Sequential, 'lightning_rl', is no algorithm"),
        (lambda: [agl.APO, agl.LightningRL()], r"stage 1 of Sequential, APO, is no algorithm; give objects: APO\("),
        (lambda: [agl.APO(), agl.Sequential([agl.APO()])], "stage 2 of Sequential is a Sequential itself"),
        (same, r"stage 2 \(lightning_rl\) is the same object as stage 1"),
        (
            lambda: [agl.LightningRL(), agl.APO(), agl.LightningRL(agents={"a": "frozen", "b": "shared"})],
            r"stage 1 \(lightning_rl\) has agents=\{\} and stage 3 \(lightning_rl\) agents=",
        ),
        (
            lambda: [agl.LightningRL(), agl.LightningRL(optimizer={"lr": 1e-3})],
            r"stage 1 \(lightning_rl\) has optimizer=.* and stage 2 \(lightning_rl\) optimizer=.*lr=0.001",
        ),
        (
            lambda: [agl.APO(), agl.LightningRL(reward_weights={"a": 1.0})],
            r"stage 1 \(apo\) has reward_weights=None and stage 2 \(lightning_rl\) reward_weights=\{'a': 1.0\}",
        ),
    ],
)
def test_stages_that_cannot_share_a_run_are_refused_by_name(stages: Callable[[], Any], named: str) -> None:
    with pytest.raises(agl.errors.ConfigError, match=named):
        agl.Sequential(stages())


@pytest.mark.parametrize("rounds", [0, 1.5])
def test_no_round_is_refused(rounds: Any) -> None:
    with pytest.raises(agl.errors.ConfigError, match=f"rounds={rounds} runs no stage"):
        agl.Sequential([agl.APO()], rounds=rounds)


def test_what_a_stage_reports_to_is_the_same_object_in_every_round() -> None:
    class Report:
        steps: list[int]

        def add(self, step: int, metrics: Any) -> None:
            self.steps.append(step)

    report = Report()
    stage = agl.SFTAlgorithm(dataset=[[{"role": "assistant", "content": "yes"}]], steps=1, on_step=report.add)
    rounds: Any = agl.Sequential([stage], rounds=2)._plan
    assert [each.on_step.__self__ is report for each in rounds] == [True, True]


def test_more_staleness_than_a_stage_has_steps_is_refused() -> None:
    stages = agl.Sequential([agl.APO(), agl.LightningRL(steps=2)])
    with pytest.raises(agl.errors.ConfigError, match=r"run.max_staleness=3 is more than the 2 steps of stage 2"):
        stages.check_staleness(3)


def test_recorded_sessions_are_learned_from_by_one_algorithm(tmp_path: Path) -> None:
    stages = agl.Sequential([agl.APO(), agl.LightningRL()])
    trainer = agl.Trainer(store=agl.InMemoryLightningStore(), algorithm=stages, run_dir=tmp_path / "run")
    with pytest.raises(agl.errors.ConfigError, match="Sequential runs an agent in each of its stages"):
        trainer.train(num_iterations=None)


async def test_a_stage_that_cannot_work_ends_the_run_before_the_first_one_begins(run: Run) -> None:
    search = run.apo(critic={"model": "nobody", "base_url": run.server.url})
    with pytest.raises(agl.errors.ConfigError, match="answered 404"):
        await run.fit(agl.Sequential([Publishes(START), search]))
    assert not run.seen


async def test_a_task_in_two_splits_is_refused_where_a_stage_selects_its_result(run: Run) -> None:
    shared = {**TASKS, "held_out_dataset": [{"n": 100}]}
    with pytest.raises(agl.errors.DatasetError, match="1 held_out tasks are validation tasks, too: rows 1"):
        await run.trainer(agl.Sequential([run.apo(), learn(1)])).fit_async(**shared)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_stages_are_written_to_toml_and_read_back_exactly(tmp_path: Path) -> None:
    stages = agl.Sequential(
        [
            agl.APO(critic={"model": "m"}, budget={"calls": None, "seconds": 60}),
            agl.LightningRL(preset="dapo", aggregate="rollout", steps=7),
            agl.LightningRL(steps=3, loss=["ppo", {"type": "kl", "coefficient": 0.2}], reference="base"),
        ],
        rounds=2,
    )
    before = agl.TrainConfig(algorithm=stages.config)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(before))
    assert load_settings(agl.TrainConfig, toml=path) == before
    after = load_settings(agl.TrainConfig, toml=path, overrides=["algorithm.stages.2.steps=9"])
    changes = changed_settings(before, after)
    assert changes == {"algorithm.stages.2.steps": (3, 9)}
    check_changes(changes)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algorithm.stages=[]", "there is no stage"),
        ('algorithm.stages=[{type="sequential"}]', "algorithm.stages.0.stages is required"),
        ('algorithm.stages=[{type="other"}]', "there is no algorithm 'other'"),
        ('algorithm.stages=[{type="apo", stepz=3}]', "unknown setting algorithm.stages.0.stepz"),
        ("algorithm.rounds=0", "algorithm.rounds = 0"),
    ],
)
def test_mistakes_in_the_settings_of_stages_are_named(override: str, named: str) -> None:
    both = ['algorithm.type="sequential"', 'algorithm.stages=[{type="apo"}]']
    with pytest.raises(agl.errors.ConfigError, match=named):
        load_settings(agl.TrainConfig, overrides=[*both, override])


def test_settings_of_different_sections_are_checked_for_every_stage() -> None:
    stages = agl.Sequential([agl.APO(), agl.LightningRL(group_size=2)])
    with pytest.raises(ValueError, match=r"algorithm\.group_size=2 is"):
        agl.TrainConfig(algorithm=stages.config, curriculum={"branching": {"share": 0.1}})
