"""Hooks, the runner, the store server, `algo` and `Trainer.dev` as code of 0.3 uses them, with a real runner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl

pytestmark = pytest.mark.integration

TASKS = [{"word": word} for word in ("red", "green", "blue")]


def agent(task: Any) -> float:
    agl.emit_message(task["word"])
    if task["word"] == "bad":
        raise ValueError("no such colour")
    return 1.0


class Notes(agl.Hook):
    """Writes what happens to a file, as it runs in another process."""

    def __init__(self, path: str) -> None:
        self.path = path

    def note(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{text}\n")

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        self.note(f"start {rollout.input['word']} {bool(runner.get_worker_id())}")

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        agl.emit_annotation({"from": "hook"})

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.note(f"trace {len(tracer.get_last_trace())}")

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: list[agl.Span]) -> None:
        self.note(f"end {[span.name.rpartition('.')[2] for span in spans]}")


async def test_a_runner_steps_through_a_task_with_hooks(store: Any, tmp_path: Path) -> None:
    runner = agl.LitAgentRunner()
    runner.init(agent, hooks=[Notes(str(tmp_path / "notes"))])
    runner.init_worker(0, store)
    rollout = await runner.step({"word": "red"}, mode="val")
    assert (rollout.status, rollout.mode) == ("succeeded", "val")
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes == ["start red True", "trace 2", "end ['annotation', 'message']"]
    spans = await store.query_spans(rollout.rollout_id)
    assert [span.name.rpartition(".")[2] for span in spans] == ["annotation", "message", "result"]
    with pytest.raises(agl.errors.AgentError, match="no such colour"):
        await runner.step({"word": "bad"})
    assert (tmp_path / "notes").read_text().splitlines()[-1].startswith("end"), "also where the agent has failed"


async def test_a_runner_takes_what_is_queued_until_its_limit(store: Any) -> None:
    for task in TASKS:
        await store.enqueue_rollout(task)
    runner = agl.LitAgentRunner(max_rollouts=2, poll_interval=0.05)
    runner.init(agent)
    with pytest.raises(agl.errors.ConfigError, match="init_worker"):
        await runner.iter()
    runner.init_worker(0, store)
    await runner.iter()
    assert len(await store.query_rollouts(status_in=["succeeded"])) == 2


async def test_a_store_server_serves_clients(store: Any) -> None:
    server = agl.LightningStoreServer(store, port=0)
    await server.start()
    client = agl.LightningStoreClient(server.endpoint)
    rollout = await client.enqueue_rollout({"word": "red"})
    assert (await server.get_rollout_by_id(rollout.rollout_id)).input == {"word": "red"}
    await client.close()
    await server.stop()


@pytest.mark.slow
def test_dev_runs_the_agent_once_on_each_task_and_trains_nothing(tmp_path: Path) -> None:
    trainer = agl.Trainer(run_dir=tmp_path / "run", n_runners=1, hooks=Notes(str(tmp_path / "notes")))
    result = trainer.dev(agent, TASKS)
    assert (result.rollouts, result.failed_rollouts) == (3, 0)
    assert result.held_out["greedy"].after == 1.0
    assert sum(line.startswith("start") for line in (tmp_path / "notes").read_text().splitlines()) == 9
    with pytest.raises(agl.errors.ConfigError, match="LightningRL trains a model"):
        agl.Trainer(algorithm=agl.LightningRL()).dev(agent, TASKS)


def test_a_function_is_an_algorithm_whose_last_resources_are_the_result(tmp_path: Path) -> None:
    seen: list[Any] = []

    @agl.algo
    async def better_prompt(*, store: Any, train_dataset: Any, val_dataset: Any, initial_resources: Any, adapter: Any):
        queued = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
        ids = [rollout.rollout_id for rollout in queued]
        finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=60)
        spans = await store.query_spans(ids[0])
        by_store = {store: len(finished)}
        seen.extend([by_store[store], len(val_dataset), adapter.adapt(spans), initial_resources["prompt"].template])
        await store.update_resources("better", {"prompt": agl.PromptTemplate(template="Please {word}")})

    @agl.prompt_rollout
    def polite(task: Any, prompt_template: Any) -> float:
        return float("Please" in prompt_template.format(**task))

    trainer = agl.Trainer(
        agl.TrainConfig(evaluation=agl.config.EvaluationConfig(every=0, modes=("greedy",))),
        algorithm=better_prompt,
        run_dir=tmp_path / "run",
        initial_resources={"prompt": agl.PromptTemplate(template="{word}")},
    )
    result = trainer.fit(polite, TASKS, [{"word": "grey"}], held_out_dataset=[{"word": "pink"}])
    assert seen == [3, 1, [], "{word}"]
    assert (result.held_out["greedy"].before, result.held_out["greedy"].after) == (0.0, 1.0)
    assert result.best_prompt.template == "Please {word}"


def test_arguments_without_a_place_say_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(agl.errors.ConfigError, match="traced with OpenTelemetry"):
        agl.Trainer(tracer=object())
    with pytest.raises(agl.errors.ConfigError, match="token trees"):
        agl.Trainer(adapter=agl.TracerTraceToTriplet())
    with pytest.raises(agl.errors.ConfigError, match="'llm_proxy'"):
        agl.algo(lambda store, llm_proxy: None)
    runner = agl.LitAgentRunner()
    with pytest.raises(agl.errors.ConfigError, match="is a command"):
        runner.init(["node", "agent.js"], hooks=agl.Hook())
    with pytest.raises(agl.errors.ConfigError, match="is no hook"):
        runner.init(agent, hooks=[os])  # type: ignore[list-item]


def test_the_otel_tracer_of_0_3_is_what_is_done_anyway() -> None:
    class OtelTracer:
        pass

    agl.Trainer(tracer=OtelTracer())
