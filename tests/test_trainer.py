"""What the trainer makes of its settings."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from tests.support import agents

import agentlightning as agl
from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.sft import SFTAlgorithm
from agentlightning.algorithms.training import Collected
from agentlightning.attempt_address import attempt_path, attempt_secret
from agentlightning.config import EvaluationConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.policy import open as opening
from agentlightning.policy.config import PolicyConfig
from agentlightning.resources import LLM
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.run import serve_run
from agentlightning.store import InMemoryLightningStore, LightningStoreClient
from agentlightning.testing import ScriptedEngine
from agentlightning.trainer import Trainer
from agentlightning.training.agent_runner import credentials, make_runner, queue_of
from agentlightning.training.persistence.checkpoints import newest_version, open_for_training
from agentlightning.training.persistence.run_dir import RunDir, RunState, read_state
from agentlightning.util.progress import Progress


async def test_its_runner_holds_a_lease_so_that_a_killed_run_leaves_nothing_behind():
    store = InMemoryLightningStore()
    runner = make_runner(RunnerConfig(concurrency=2, fresh_process=True), store, agents.reward_of_task, None, "secret")
    await runner.start("http://127.0.0.1:9")
    [worker] = await store.query_workers()
    assert worker.lease_seconds is not None
    ids = [r.rollout_id for r in await store.enqueue_many_rollouts([EnqueueRolloutRequest({"reward": 1})] * 3)]
    ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
    assert [rollout.status for rollout in ended] == ["succeeded"] * 3
    assert runner.pool.fresh
    await runner.stop()
    await store.close()


async def test_in_flight_is_refused_at_the_start_where_the_policy_cannot_do_it(monkeypatch, tmp_path):
    class Stubborn:
        closed = False

        async def close(self):
            self.closed = True

    policy = Stubborn()

    async def open_policy(config):
        return policy

    monkeypatch.setattr(opening, "open_policy", open_policy)
    run_dir = RunDir.create(tmp_path / "run")
    config = TrainConfig(policy=PolicyConfig(model=str(tmp_path), in_flight=True))
    with pytest.raises(ConfigError, match=r"policy.in_flight = true: .*leave in_flight false"):
        await open_for_training(
            config, LightningRL(), run_dir, RunState(run_id="r"), InMemoryLightningStore(), Progress(), AsyncMock()
        )
    assert policy.closed
    run_dir.close()


async def test_a_resumed_run_gives_its_weights_a_version_that_no_agent_has_seen():
    """The steps after the checkpoint were lost; what their agents did with later weights is still in the store."""
    store, state = InMemoryLightningStore(), RunState(run_id="r", step=5)
    assert await newest_version(store, state) == 0
    for step, version in ((4, 4), (5, 5), (6, 6), (7, 7)):
        llm = LLM(endpoint="http://h", model="policy", policy_version=version)
        await store.add_resources({"llm": llm}, state.step_name(step))
    assert await newest_version(store, state) == 7
    await store.close()


def linear():
    return type("Linear", (), {})()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"algorithm": "grpo"}, r"there is no algorithm 'grpo'; did you mean 'algorithm\.preset=grpo'\?"),
        ({"algorithm": Path}, r"pathlib.py\) is no algorithm; it should be a subclass of .*base:Algorithm"),
        ({"model": linear()}, "model is a Linear object.*save_pretrained"),
        ({"n_runners": -3}, r"hosts = -3 \(given as n_runners\) should be greater"),
        ({"store": "sessions.db"}, r"store is a str, not a store; give store=agl\.LightningStore"),
        ({"seed": "x"}, r'seed = "x" \(given to Trainer\) should be a valid integer'),
        ({"model": "a", "algorithm": SFTAlgorithm("b")}, "'a' was given to the trainer and 'b' to the algorithm"),
    ],
)
def test_arguments_that_cannot_work_are_named_at_once(arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Trainer(**arguments)


@pytest.mark.parametrize("kind", ["dpo", "rejection", "sft"])
def test_a_warmup_as_long_as_the_run_is_refused_at_once(kind: str) -> None:
    settings: Any = {"type": kind, "steps": 5, "optimizer": {"warmup_steps": 5}}
    with pytest.raises(ValueError, match=r"optimizer.warmup_steps=5 must be below total_steps=5"):
        agl.TrainConfig(algorithm=settings)
    dpo = agl.DPO(steps=9, optimizer=agl.config.OptimizerConfig(warmup_steps=5))
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps=5 must be below total_steps=4"):
        agl.Trainer(algorithm=dpo).train(4)


def test_a_critic_without_a_value_head_is_refused_at_once():
    critic = LightningRL(credit="value", loss=["ppo", "value"])
    with pytest.raises(ConfigError, match=r'set policy\.value_head="linear"'):
        Trainer(algorithm=critic)
    config = TrainConfig(policy=PolicyConfig(value_head="linear"))
    assert Trainer(config, algorithm=critic).config.algorithm is critic.config


def test_the_model_of_an_algorithm_is_the_one_that_is_trained():
    assert Trainer(algorithm=SFTAlgorithm("models/mine")).config.policy.model == "models/mine"
    assert Trainer(algorithm=LightningRL(steps=7)).config.algorithm.steps == 7


class Draws(Algorithm):
    """One step that draws at random and trains no model."""

    total_steps = 1
    learns_weights = False
    seed = None

    async def run(self, training):
        self.seed = training.seed
        await training.finish_step(Collected(()), {})


def test_an_algorithm_reads_the_seed_of_the_run_and_the_run_says_that_it_trains_no_model(tmp_path):
    config = TrainConfig(run=RunConfig(seed=7), evaluation=EvaluationConfig(modes=("greedy",)))
    trainer = Trainer(config, algorithm=Draws(), run_dir=tmp_path / "run", progress=Progress(enabled=False))
    trainer.fit(agents.reward_of_task, [{"reward": 1}], held_out_dataset=[{"reward": 0}])
    assert trainer.algorithm.seed == 7
    state = read_state(tmp_path / "run")
    assert (state.step, state.learns_weights) == (1, False)


@pytest.mark.parametrize(("host", "without_key"), [("127.0.0.1", 200), ("0.0.0.0", 401)])
async def test_a_run_that_other_machines_can_reach_answers_no_call_without_a_key(host, without_key, tmp_path):
    run_dir, store = RunDir.create(tmp_path / "run"), InMemoryLightningStore()
    config = TrainConfig(run=RunConfig(host=host))
    async with AsyncExitStack() as stack:
        stack.callback(run_dir.close)
        stack.push_async_callback(store.close)
        engine = ScriptedEngine(["hello"], model="policy")
        server = await serve_run(config, store, engine, run_dir, stack, "secret", "t")
        rollout = await store.start_rollout({"question": "?"})
        url = server.url + attempt_path(rollout.rollout_id, rollout.attempt.attempt_id)
        async with httpx.AsyncClient(trust_env=False) as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            reply = await client.post(f"{url}/v1/chat/completions", json=body)
    assert reply.status_code == without_key, reply.text


HUB = LightningStoreClient("http://hub.example:4747", "token")


@pytest.mark.parametrize(
    ("trainer", "agent", "complaint"),
    [
        (Trainer(n_runners=0), None, "need a store that they can reach"),
        (Trainer(n_runners=0, store=HUB), "agent.py:solve", "give them there: agl runner"),
        (Trainer(n_runners=0, store=HUB, reward="reward.py:score"), None, "give them there: agl runner"),
        (Trainer(n_runners=0, store=HUB), None, "run.host=127.0.0.1 cannot be reached by runners of hub.example"),
        (Trainer(store=HUB), None, "no agent"),
    ],
)
def test_rollouts_that_nobody_could_run_are_refused_before_anything_is_made(trainer, agent, complaint, tmp_path):
    trainer.run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match=complaint):
        trainer.fit(agent, [1, 2, 3, 4, 5])
    assert not trainer.run_dir.exists()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"run": {"max_staleness": 3}, "algorithm": {"type": "lightning_rl", "steps": 2}},
            "run.max_staleness=3 is more than the 2 steps",
        ),
        ({"algorithm": {"type": "lightning_rl", "proximal": "interpolate"}}, "does nothing with run.max_staleness=0"),
    ],
)
def test_ages_of_rollouts_that_cannot_be_are_refused_before_a_model_is_loaded(
    settings, complaint, tmp_path, monkeypatch
):
    monkeypatch.setattr("agentlightning.run.make_starting_policy", lambda *_: pytest.fail("the model was made"))
    trainer = Trainer(TrainConfig.model_validate(settings), run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=complaint):
        trainer.fit(lambda task: 1.0, [{"n": n} for n in range(20)])


def test_steps_bound_the_age_of_rollouts_of_an_algorithm_with_a_check_of_its_own(tmp_path, monkeypatch):
    class Own(LightningRL):
        def check_staleness(self, max_staleness: int) -> None:
            """Any will do."""

    monkeypatch.setattr("agentlightning.run.make_starting_policy", lambda *_: pytest.fail("the model was made"))
    config = TrainConfig(run=RunConfig(max_staleness=3))
    with pytest.raises(ConfigError, match=r"run.max_staleness=3 is more than the 2 steps"):
        Trainer(config, algorithm=Own(steps=2), run_dir=tmp_path / "run").fit(lambda task: 1.0, list(range(20)))


def test_a_run_on_a_shared_store_has_a_queue_of_its_own_where_it_has_runners():
    assert queue_of(RunnerConfig(), None, "r1") is None
    assert queue_of(RunnerConfig(), HUB, "r1") == "_run-r1"
    assert queue_of(RunnerConfig(hosts=0), HUB, "r1") is None
    assert queue_of(RunnerConfig(queue="mine"), HUB, "r1") == "mine"


def test_attempts_on_a_shared_store_have_keys_that_its_runners_can_make():
    assert credentials(HUB)[1] == attempt_secret("token")
    assert credentials()[1] != credentials()[1]
