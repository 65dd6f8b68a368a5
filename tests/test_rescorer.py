"""A new reward function for stored rollouts: what is read afterwards, and what stays."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentlightning import span as names
from agentlightning.cli.main import build
from agentlightning.errors import AgentError, RewardError
from agentlightning.rescorer import Rescoring, rescore, rescore_async
from agentlightning.span import Span, new_span_id
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.rewards import find_final_reward
from agentlightning.training.sources.collector import RolloutPlan, TrajectoryReader


async def add(store: LightningStoreBase, number: int, *, reward: float | None = 0.0, status: Any = "succeeded") -> str:
    """A rollout of one call that was given an intermediate reward of 0.5 and a final one."""
    rollout = await store.start_rollout(
        {"number": number, "level": number % 2}, mode="train", rollout_id=f"run1-{number:03d}"
    )
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    call = {
        names.OPERATION_NAME: "chat",
        names.PROMPT_TOKEN_IDS: [1],
        names.RESPONSE_TOKEN_IDS: [2],
        names.LOGPROBS: [-0.5],
    }
    await store.add_span(Span(*ids, "chat", 0.0, span_id=new_span_id(), attributes=call))
    for value in () if reward is None else (0.5, reward):
        attributes = {names.SCORE_VALUE: value}
        await store.add_span(Span(*ids, names.REWARD, 0.0, span_id=new_span_id(), attributes=attributes))
    await store.update_attempt(*ids, status=status, metadata={"output": f"answer {number}"})
    return rollout.rollout_id


async def apply(store: LightningStoreBase, function: Any, dry_run: bool = False, **filters: Any) -> Rescoring:
    return await rescore_async(store, function, **filters, dry_run=dry_run)


def number(task: Any, output: Any) -> float:
    assert output == f"answer {task['number']}"
    return float(task["number"])


async def final(store: LightningStoreBase, rollout_id: str) -> Any:
    return find_final_reward(await store.query_spans(rollout_id))


async def test_learning_reads_the_new_reward_and_the_same_intermediate_ones(store: InMemoryLightningStore) -> None:
    rollout_id = await add(store, 3)
    found = await apply(store, number)
    assert (found.rollouts, found.rescored, found.mean_before, found.mean_after) == (1, 1, 0.0, 3.0)
    ((trajectory,), _) = await TrajectoryReader(store).read([RolloutPlan(rollout_id, None, "g")])
    assert (trajectory.reward, trajectory.transitions[0].reward) == (3.0, 0.5)
    assert await final(store, rollout_id) == 3.0


async def test_earlier_rewards_stay_recorded(store: InMemoryLightningStore) -> None:
    rollout_id = await add(store, 3)
    await apply(store, number)
    await apply(store, lambda: 7)
    spans = await store.query_spans(rollout_id, name=names.REWARD)
    assert [span.attributes[names.SCORE_VALUE] for span in spans] == [0.5, 0.0, 3.0, 7.0]
    assert await final(store, rollout_id) == 7.0


async def test_repeating_it_changes_nothing_and_going_back_does(store: InMemoryLightningStore) -> None:
    rollout_id = await add(store, 3)
    for function, rescored, reward in ((number, 1, 3.0), (number, 0, 3.0), (lambda: 7, 1, 7.0), (number, 1, 3.0)):
        found = await apply(store, function)
        assert (found.rescored, found.unchanged) == (rescored, 1 - rescored)
        assert await final(store, rollout_id) == reward


async def test_a_missing_reward_is_filled_in(store: InMemoryLightningStore) -> None:
    rollout_id = await add(store, 2, reward=None)
    assert (await apply(store, number)).mean_before is None
    assert await final(store, rollout_id) == 2.0


async def test_named_dimensions_and_async_functions_work(store: InMemoryLightningStore) -> None:
    rollout_id = await add(store, 2)

    async def judge(task: Any, spans: list[Span]) -> dict[str, float]:
        return {"right": 1.0, "calls": float(sum(span.name == "chat" for span in spans))}

    await apply(store, judge)
    assert await final(store, rollout_id) == {"right": 1.0, "calls": 1.0}


async def test_a_dry_run_writes_nothing(store: InMemoryLightningStore) -> None:
    rollout_id = await add(store, 3)
    found = await apply(store, number, dry_run=True)
    assert (found.rescored, found.dry_run, found.mean_after) == (1, True, 3.0)
    assert await final(store, rollout_id) == 0.0


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({}, 3),
        ({"task": {"level": 1}}, 2),
        ({"task": {"number": 1, "level": 1}}, 1),
        ({"run": "run1-00"}, 3),
        ({"run": "run2"}, 0),
        ({"status": ("failed",)}, 1),
        ({"status": ("succeeded", "failed")}, 4),
        ({"mode": ("val",)}, 0),
    ],
)
async def test_only_the_rollouts_that_match_are_scored(
    store: InMemoryLightningStore, filters: dict[str, Any], count: int
) -> None:
    for each in (1, 2, 3):
        await add(store, each)
    await add(store, 4, status="failed")
    assert (await apply(store, number, **filters)).rescored == count


async def test_a_rollout_that_never_ran_is_counted(store: InMemoryLightningStore) -> None:
    await store.enqueue_rollout({"number": 1})
    found = await apply(store, number, status=("queuing",))
    assert (found.rollouts, found.without_attempt, found.rescored) == (1, 1, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "good"])
async def test_a_bad_reward_is_named_and_counted_and_the_rollout_keeps_its_own(
    store: InMemoryLightningStore, bad: Any
) -> None:
    ids = [await add(store, each) for each in (1, 2)]
    found = await apply(store, lambda task: 1.0 if task["number"] == 1 else bad)
    assert list(found.failed) == [ids[1]]
    assert "RewardError" in found.failed[ids[1]]
    assert (await final(store, ids[0]), await final(store, ids[1])) == (1.0, 0.0)


async def test_a_function_that_scores_nothing_is_an_error_with_its_cause(store: InMemoryLightningStore) -> None:
    rollout_id = await add(store, 1)
    with pytest.raises(RewardError, match=rf"none of 1 rollouts.*{rollout_id}: KeyError: 'nothing'"):
        await apply(store, lambda task: task["nothing"])


async def test_a_function_that_cannot_be_loaded_is_an_error(store: InMemoryLightningStore) -> None:
    with pytest.raises(AgentError, match="nowhere"):
        await apply(store, "nowhere:score")


def test_the_synchronous_function_takes_its_filters(tmp_path: Path) -> None:
    import asyncio

    async def fill() -> None:
        store = LightningStore(tmp_path / "store.db")
        await add(store, 1)
        await add(store, 2)
        await store.close()

    asyncio.run(fill())
    assert rescore(LightningStore(tmp_path / "store.db"), number, task={"level": 1}).rescored == 1


def test_the_command_line_scores_the_rollouts_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def fill() -> None:
        store = LightningStore(tmp_path / "run" / "store.db")
        for each in (1, 2):
            await add(store, each)
        await store.close()

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.json").write_text('{"run_id": "run1"}')
    (tmp_path / "mine.py").write_text("def score(task, output):\n    return float(task['number'])\n")
    asyncio.run(fill())
    monkeypatch.chdir(tmp_path)
    words = ["rescore", "--reward", "mine.py:score", "--run", "run", "--task", '{"level": 1}', "--json"]
    for expected in ((1, 0), (0, 1)):
        result = CliRunner().invoke(build(), words)
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout.splitlines()[-1])
        assert (record["rescored"], record["unchanged"]) == expected
    shown = CliRunner().invoke(build(), ["rescore", "--reward", "mine.py:score", "--run", "run", "--dry-run"])
    assert "1 of 2 rollouts would get a new reward; 1 unchanged" in shown.output
    assert "mean reward 0.5 -> 1.5" in shown.output
    for bad in (["--task", "{"], ["--status", "done"], ["--store", "nothing.db"]):
        assert CliRunner().invoke(build(), ["rescore", "--reward", "mine.py:score", *bad]).exit_code == 2
