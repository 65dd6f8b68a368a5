"""The published surfaces run as written: the snippets of the vision, the names of 0.x, the contract of 1.0 agents.

Everything is synchronous code without an event loop, as a user's script is; only what a snippet leaves open (`...`) is
filled, with a tiny model, an agent and tasks."""

from __future__ import annotations

import asyncio
import inspect
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning.demo.problems import demonstrations
from agentlightning.models.tiny import make_tiny
from agentlightning.store.types import RolloutRecord

pytestmark = pytest.mark.integration

RECORD = """
with agl.track_session():                       # a rollout made by your own code, recorded in the store
    with agl.track_agent("writer"):             # who is speaking; also the unit of selective optimisation
        agl.emit_prompt(prompt); agl.emit_response(text)      # or emit_prompt(prompt, response)
        agl.emit_tool_call(name, args, result); agl.emit_step(step); agl.emit_message(m); agl.emit_completion(r)
    agl.emit_reward(0.9)                        # or emit_reward({"correctness": 1.0, "format": 0.5})
with agl.track_critical_path(): ...             # record only what is marked; track_all(): also third-party instrumentation
"""  # noqa: E501
RECORD_OTHERWISE = """
with agl.track_session():
    with agl.track_agent("writer"):
        agl.emit_prompt(prompt, response)
    agl.emit_reward({"correctness": 1.0, "format": 0.5})
track_all = agl.track_all()
"""
TRAIN = """
store = agl.LightningStore()
algorithm = agl.LightningRL(store=store, credit_assignment="hierarchical")
trainer = agl.Trainer(store=store, algorithm=algorithm)
trainer.train(num_iterations=100)               # from recorded sessions; with agent=..., from new rollouts
trainer.train(target_agent="writer")            # only that agent learns (alias: target=)
"""
IMITATE = """
agl.SFTAlgorithm(model=MODEL, dataset=store.get_successful_trajectories()).train()
"""
EVALUATE = """
assert agl.evaluate(agent, eval_set) > 0.4
"""
SAID = {
    "prompt": "6 x 7?",
    "text": "42",
    "name": "times",
    "args": {"a": 6, "b": 7},
    "result": 42,
    "step": "check",
    "m": {"role": "user", "content": "sure?"},
    "r": "yes",
    "response": "42",
}


def run(snippet: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(snippet, "<the vision>", "exec"), names)
    return names


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, as a user has one: nothing is configured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    return tmp_path


def stored(read: Any) -> Any:
    """What `read(store)` gives for the store of this directory."""

    async def reading() -> Any:
        store = agl.LightningStore()
        try:
            return await read(store)
        finally:
            await store.close()

    assert agl.flush_recording()
    return asyncio.run(reading())


async def records(store: agl.LightningStore) -> list[RolloutRecord]:
    return await store.read_records([rollout.rollout_id for rollout in await store.query_rollouts()])


# -- the vision --------------------------------------------------------------------------------------------------------


def test_what_the_first_snippet_says_is_in_the_store(desk: Path) -> None:
    run(RECORD, {"agl": agl, **SAID})
    first, second = stored(records)
    assert [span.name for span in first.spans] == [
        "chat",
        "execute_tool times",
        "agentlightning.operation",
        "agentlightning.message",
        "agentlightning.response",
        "gen_ai.evaluation.result",
    ]
    assert {span.attributes.get("gen_ai.agent.name") for span in first.spans[:-1]} == {"writer"}
    assert agl.find_final_reward(first.spans) == 0.9
    assert {first.rollout.status, second.rollout.status} == {"succeeded"}
    assert (desk / ".agentlightning" / "store.db").exists()


def test_so_do_the_forms_its_comments_name(desk: Path) -> None:
    names = run(RECORD_OTHERWISE, {"agl": agl, **SAID})
    names["track_all"].stop()
    [recorded] = stored(records)
    assert [span.name for span in recorded.spans] == ["chat", "gen_ai.evaluation.result"]
    assert agl.find_final_reward(recorded.spans) == {"correctness": 1.0, "format": 0.5}


@pytest.mark.slow
def test_the_whole_vision_runs_as_one_script(desk: Path) -> None:
    from transformers import AutoModelForCausalLM

    names: dict[str, Any] = {"agl": agl, **SAID}
    run(RECORD, names)
    for text, reward in (("42", 1.0), ("41", 0.0), ("7", 0.0)):
        with agl.track_session(), agl.track_agent("writer"):
            agl.emit_prompt("6 x 7?", text)
            agl.emit_reward(reward)
    assert agl.flush_recording()
    run(TRAIN, names)
    assert names["trainer"].run_dir.joinpath("report.json").exists()
    names["MODEL"] = AutoModelForCausalLM.from_pretrained(
        make_tiny(desk / "tiny", demonstrations(20), hidden_size=32, heads=2)
    )
    before = names["MODEL"].model.layers[0].mlp.up_proj.weight.detach().clone()
    run(IMITATE, names)
    assert (before != names["MODEL"].model.layers[0].mlp.up_proj.weight).any()
    names["agent"], names["eval_set"] = answer, [{"question": "Why?"}, {"question": "So."}]
    run(EVALUATE, names)


def answer(task: Any) -> float:
    return float(task["question"].endswith("?"))


# -- the names of 0.x --------------------------------------------------------------------------------------------------

NAMES = [
    "rollout",
    "llm_rollout",
    "prompt_rollout",
    "LitAgent",
    "Trainer",
    "LLM",
    "PromptTemplate",
    "NamedResources",
    "Dataset",
    "Rollout",
    "Attempt",
    "Span",
    "InMemoryLightningStore",
    "LightningStoreServer",
    "LightningStoreClient",
    "OtelTracer",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "operation",
    "find_final_reward",
    "TracerTraceToTriplet",
    "TraceToMessages",
    "Triplet",
    "APO",
    "algo",
    "Hook",
    "LitAgentRunner",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_0_x_is_there(name: str) -> None:
    assert getattr(agl, name) is not None


class Counting(agl.Hook):
    def __init__(self, path: Path) -> None:
        self.path = path

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{rollout.mode}\n")


def test_a_trainer_of_0_x_with_every_argument_of_its_own(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    @agl.algo
    async def search(*, store: Any, train_dataset: Any, val_dataset: Any, initial_resources: Any, adapter: Any) -> None:
        queued = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
        done = await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in queued], timeout=60)
        attempt = await store.get_latest_attempt(done[0].rollout_id)
        seen.update(
            tasks=len(train_dataset),
            rollout=done[0],
            attempt=attempt,
            adapter=adapter,
            first=initial_resources["main_prompt"],
        )
        seen["spans"] = await store.query_spans(done[0].rollout_id)
        await store.update_resources("better", {"main_prompt": agl.PromptTemplate(template="Please: {word}")})

    @agl.prompt_rollout
    def polite(task: Any, prompt_template: agl.PromptTemplate) -> float:
        with agl.operation(kind="thought"):
            agl.emit_message("thinking")
        return float("Please" in prompt_template.format(**task))

    store, adapter = agl.InMemoryLightningStore(), agl.TraceToMessages()
    resources: agl.NamedResources = {"main_prompt": agl.PromptTemplate(template="{word}")}
    tasks: agl.Dataset = [{"word": word} for word in ("red", "green", "blue")]
    trainer = agl.Trainer(
        n_runners=1,
        algorithm=search,
        store=store,
        initial_resources=resources,
        hooks=Counting(tmp_path / "hooks"),
        run_dir=tmp_path / "run",
        adapter=adapter,
        tracer=agl.OtelTracer(),
    )
    result: Any = trainer.fit(agent=polite, train_dataset=tasks, val_dataset=[{"word": "grey"}])
    assert seen["adapter"] is adapter
    assert isinstance(seen["rollout"], agl.Rollout)
    assert isinstance(seen["attempt"], agl.Attempt)
    assert all(isinstance(span, agl.Span) for span in seen["spans"])
    assert agl.find_final_reward(seen["spans"]) == 0.0
    assert seen["first"].template == "{word}"
    assert result.best_prompt.template == "Please: {word}"
    assert (tmp_path / "hooks").read_text().splitlines().count("train") == seen["tasks"]
    assert len(asyncio.run(store.query_rollouts())) > seen["tasks"], "the store that was given is the one that is used"


def test_an_argument_without_a_job_says_what_to_use_instead() -> None:
    with pytest.raises(agl.errors.ConfigError, match=r"@agl\.algo.*algorithm\.target_agent"):
        agl.Trainer(algorithm=agl.LightningRL(), adapter=agl.TracerTraceToTriplet(agent_match="writer"))
    with pytest.raises(agl.errors.ConfigError, match=r"no method adapt"):
        agl.Trainer(algorithm=agl.algo(lambda store, adapter: None), adapter=3)
    with pytest.raises(agl.errors.ConfigError, match=r"traced with OpenTelemetry.*Leave it out"):
        agl.Trainer(tracer=object())


@pytest.mark.slow
def test_dev_tries_the_agent_on_tasks(desk: Path) -> None:
    result = agl.Trainer(n_runners=1).dev(answer, [{"question": "Why?"}, {"question": "So."}])
    assert result.held_out["greedy"].after == 0.5


class Multiply(agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        llm = resources["main_llm"]
        assert isinstance(llm, agl.LLM)
        agl.emit_object({"asked": llm.model})
        return 0.25


def test_a_runner_of_0_x_steps_and_its_tracer_has_the_trace(desk: Path) -> None:
    tracer, store = agl.OtelTracer(), agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(tracer)
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="m")

    async def steps() -> agl.Rollout:
        with runner.run_context(agent=Multiply(), store=store):
            return await runner.step({"a": 6}, resources={"main_llm": llm})

    assert asyncio.run(steps()).status == "succeeded"
    assert agl.find_final_reward(tracer.get_last_trace()) == 0.25
    assert tracer.get_last_trace()[0].name == "agentlightning.object"
    with pytest.raises(agl.errors.ConfigError, match="has no agent"):
        asyncio.run(runner.step({}))


def test_a_tracer_of_0_x_writes_to_the_attempt_it_is_given() -> None:
    async def traced() -> list[agl.Span]:
        store, tracer = agl.InMemoryLightningStore(), agl.OtelTracer()
        rollout = await store.start_rollout({"a": 6})
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context("mine", store=store, **ids) as inner:
            with inner.start_as_current_span("by hand"):
                agl.emit_reward(1.0)
        assert [each.name for each in tracer.get_last_trace()] == ["gen_ai.evaluation.result", "by hand"]
        with pytest.raises(agl.errors.ConfigError, match="attempt_id not given"):
            async with tracer.trace_context(store=store, rollout_id="ro-1"):
                pass
        return await store.query_spans(rollout.rollout_id)

    assert [span.name for span in asyncio.run(traced())] == ["gen_ai.evaluation.result", "by hand"]


def test_adapters_give_triplets_and_messages_of_recorded_calls(desk: Path) -> None:
    with agl.track_session():
        agl.emit_prompt("6 x 7?", "42")
        agl.emit_reward(1.0)
    [recorded] = stored(records)
    [triplet] = agl.TracerTraceToTriplet().adapt(recorded.spans)
    assert isinstance(triplet, agl.Triplet)
    assert triplet.reward == 1.0
    [conversation] = agl.TraceToMessages().adapt(recorded.spans)
    assert [message["content"] for message in conversation["messages"]] == ["6 x 7?", "42"]


def test_an_apo_of_0_x_is_made_with_its_own_parameters() -> None:
    search = agl.APO(object(), gradient_model="gpt-5-mini", apply_edit_model="gpt-5-mini", beam_width=2, beam_rounds=1)
    assert search.config.search == "beam"
    assert (search.config.beam.beam_width, search.config.critic.model) == (2, "gpt-5-mini")


def test_a_server_of_0_x_speaks_rest_and_otlp_at_port_4747_by_default() -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    assert inspect.signature(agl.LightningStoreServer).parameters["port"].default == 4747

    def export(url: str, ids: dict[str, str]) -> None:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
        span = provider.get_tracer("any SDK").start_span("from an SDK")
        span.set_attributes(ids)
        span.end()
        provider.shutdown()

    async def served() -> None:
        server = agl.LightningStoreServer(agl.InMemoryLightningStore(), port=0)
        await server.start()
        async with httpx.AsyncClient(base_url=f"{server.endpoint}/v1/agl", trust_env=False) as rest:
            assert (await rest.get("/health")).status_code == 200
            body = {"rollouts": [{"input": {"question": "6 x 7"}, "mode": "train"}]}
            assert (await rest.post("/queues/rollouts/enqueue", json=body)).status_code < 300
            assert (await rest.get("/rollouts")).json()["total"] == 1
        client = agl.LightningStoreClient(server.endpoint)
        rollout = await client.start_rollout({"question": "6 x 7"})
        ids = {"agentlightning.rollout_id": rollout.rollout_id, "agentlightning.attempt_id": rollout.attempt.attempt_id}
        await asyncio.to_thread(export, server.endpoint, ids)
        assert [span.name for span in await client.query_spans(rollout.rollout_id)] == ["from an SDK"]
        await client.close()
        await server.stop()

    asyncio.run(served())


# -- the contract of 1.0 agents ----------------------------------------------------------------------------------------

AGENT = """
import json, os, urllib.request

def post(url, body):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["AGL_KEY"]}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()

for name in ("OPENAI", "ANTHROPIC"):
    assert os.environ[f"{name}_API_KEY"] and os.environ["AGL_KEY"] in os.environ[f"{name}_BASE_URL"]
body = {"model": "policy", "messages": [{"role": "user", "content": "6 x 7?"}], "max_tokens": 4}
reply = json.loads(post(os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", body))
assert reply["choices"][0]["message"]["role"] == "assistant"
post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": 1.0}})
"""


@pytest.mark.slow
def test_an_agent_of_1_0_in_any_language_needs_three_variables(desk: Path) -> None:
    tiny = make_tiny(desk / "tiny", demonstrations(20), hidden_size=32, heads=2)
    (desk / "agent.py").write_text(AGENT)
    assert agl.evaluate(f"{sys.executable} agent.py", [{"question": "6 x 7"}], model=tiny) == 1.0
