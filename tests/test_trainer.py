"""What the trainer makes of its settings."""

from agentlightning.config import RunnerConfig
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import agents
from agentlightning.trainer import _runner


async def test_its_runner_holds_a_lease_so_that_a_killed_run_leaves_nothing_behind():
    store = InMemoryLightningStore()
    runner = _runner(RunnerConfig(concurrency=2, fresh_process=True), store, agents.reward_of_task, None, "secret")
    await runner.start("http://127.0.0.1:9")
    [worker] = await store.query_workers()
    assert worker.lease_seconds is not None
    ids = [r.rollout_id for r in await store.enqueue_many_rollouts([EnqueueRolloutRequest({"reward": 1})] * 3)]
    ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
    assert [rollout.status for rollout in ended] == ["succeeded"] * 3
    assert runner.pool.fresh
    await runner.stop()
    await store.close()
