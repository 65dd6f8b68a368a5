"""The stream: rollouts run while a step trains, a step waits for no slow group, and nothing is older than the bound."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.training import BranchPoint, Collected, RolloutRequest, Want
from agentlightning.config import Branching, CurriculumConfig, TurnLimit
from agentlightning.errors import ConfigError, TrainingStopped
from agentlightning.rollouts import AttemptedRollout
from agentlightning.span import (
    LOGPROBS,
    OPERATION_NAME,
    POLICY_VERSION,
    PROMPT_TOKEN_IDS,
    RESPONSE_TOKEN_IDS,
    Span,
    new_span_id,
)
from agentlightning.store import InMemoryLightningStore
from agentlightning.training.health.step_record import step_line
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.sources.collector import RolloutCollector, TrajectoryReader
from agentlightning.training.sources.stream import InFlightLimit, RolloutStream

BRANCHING = CurriculumConfig(branching=Branching(share=0.5, threshold=0.5, after="any"))
TASKS = [{"n": n} for n in range(8)]
REQUEST = RolloutRequest([Want(n=2)] * 2)


class Loop:
    """A training loop around a stream: each step raises the version of the weights by one."""

    def __init__(self, store: InMemoryLightningStore, finish: Any, max_staleness: int, total_steps: int = 4) -> None:
        self.store, self.finish = store, finish
        self.state = RunState(run_id="r")
        self.version = 0
        self.usage: float | None = None
        self.published: list[tuple[str, int]] = []
        self.turn_limits: list[int | None] = []
        self.notes: list[str] = []
        self.noted = asyncio.Event()
        self.source = RolloutStream(
            RolloutCollector(TrajectoryReader(store)),
            TASKS,
            self.state,
            self.publish,
            cast("Any", SimpleNamespace(note=self.note, update=lambda done, **shown: None)),
            cast("Any", self),
            max_staleness=max_staleness,
            total_steps=total_steps,
            limit=InFlightLimit(self.load),
        )

    versions: ClassVar[dict[str, int]] = {}

    @property
    def policy_version(self) -> int:
        return self.version

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.noted.set()

    async def load(self) -> float | None:
        usage, self.usage = self.usage, 0.7
        return usage

    async def publish(self, resources_id: str, temperature: float, max_calls: int | None) -> str:
        self.published.append((resources_id, self.version))
        self.turn_limits.append(max_calls)
        if await self.store.get_resources_by_id(resources_id) is None:
            await self.store.add_resources({}, resources_id)
        return resources_id

    async def claim(self, count: int) -> list[AttemptedRollout]:
        claimed = [await self.store.dequeue_rollout(timeout=5) for _ in range(count)]
        return [rollout for rollout in claimed if rollout is not None]

    def train(self) -> None:
        self.state.step += 1
        self.version += 1

    def killed(self, step: int, version: int) -> Loop:
        """A process that resumes the run after this one was killed, with the state after `step` steps."""
        after = Loop(self.store, self.finish, self.source.max_staleness, self.source.total_steps)
        after.source.state = after.state = self.state
        after.state.step, after.version = step, version
        return after


def groups_of(collected: Collected) -> list[str]:
    return sorted({each.group.removeprefix("r-train-") for each in collected.trajectories})


def group_of(rollout: AttemptedRollout) -> str:
    return rollout.metadata["group"].removeprefix("r-train-")


async def worker(loop: Loop, seconds: Callable[[AttemptedRollout], float], seen: Counter[str]) -> None:
    """Runs one rollout after another, each with the weights that are the newest when it begins."""
    while (rollout := await loop.store.dequeue_rollout(timeout=30)) is not None:
        seen[rollout.rollout_id] += 1
        version = loop.version
        await asyncio.sleep(seconds(rollout))
        await loop.finish(rollout, version=version)


async def run(loop: Loop, steps: int, workers: int, seconds: Callable[[AttemptedRollout], float]) -> Any:
    """(groups of each step, how often each rollout ran, ages of what was learned from)."""
    seen, batches, ages = Counter[str](), list[list[str]](), list[int]()
    running = [asyncio.create_task(worker(loop, seconds, seen)) for _ in range(workers)]
    try:
        while loop.state.step < steps:
            collected = await asyncio.wait_for(loop.source.next(REQUEST), 30)
            batches.append(groups_of(collected))
            versions = [call.policy_version for each in collected.trajectories for call in each.transitions]
            ages += [loop.version - version for version in versions if version is not None]
            loop.train()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return batches, seen, ages


# -- flow ------------------------------------------------------------------------------------------------------------


async def test_a_step_takes_the_first_groups_that_are_complete(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=1)
    first = asyncio.create_task(loop.source.next(REQUEST))
    claimed = await loop.claim(8)
    assert loop.published == [("r-train-000001", 0), ("r-train-000002", 0)]
    for rollout in claimed:
        if group_of(rollout) in ("000001-0001", "000002-0000"):
            await finish(rollout, version=0)
    assert groups_of(await first) == ["000001-0001", "000002-0000"], "the others are still running"
    loop.train()
    second = asyncio.create_task(loop.source.next(REQUEST))
    for rollout in [each for each in claimed if group_of(each) in ("000001-0000", "000002-0001")]:
        await finish(rollout, version=0)
    assert groups_of(await second) == ["000001-0000", "000002-0001"]
    assert loop.published[2:] == [("r-train-000003", 1)], "two groups were started for the two that were taken"


async def test_without_staleness_a_step_takes_its_own_groups(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=0, total_steps=3)
    chance = random.Random(1)
    batches, seen, ages = await run(loop, 3, 4, lambda rollout: chance.uniform(0, 0.02))
    assert batches == [[f"{step:06d}-{index:04d}" for index in range(2)] for step in (1, 2, 3)]
    assert set(seen.values()) == {1}
    assert set(ages) == {0}, "each with the step's weights"
    assert loop.published == [(f"r-train-{step + 1:06d}", step) for step in range(3)]


async def test_the_limit_on_turns_follows_the_turn_that_a_rollout_belongs_to(
    store: InMemoryLightningStore, finish: Any
) -> None:
    loop = Loop(store, finish, max_staleness=1)
    loop.source.curriculum = CurriculumConfig(turns=TurnLimit(start=2, grow=3, every=1))
    await run(loop, 2, 4, lambda rollout: 0)
    limits = {name: limit for (name, _), limit in zip(loop.published, loop.turn_limits, strict=True)}
    assert limits["r-train-000001"] == 2
    assert limits["r-train-000002"] == 5


async def two_calls(loop: Loop, rollout: AttemptedRollout) -> list[str]:
    """Finish a rollout of two calls, the second of which is less certain. Returns their span ids."""
    ids, spans = (rollout.rollout_id, rollout.attempt.attempt_id), [new_span_id(), new_span_id()]
    for number, span_id in enumerate(spans):
        call = {OPERATION_NAME: "chat", PROMPT_TOKEN_IDS: [1] * (number + 1), RESPONSE_TOKEN_IDS: [2, 3]}
        call |= {LOGPROBS: [-0.1 - number] * 2, POLICY_VERSION: loop.version}
        await loop.store.add_span(Span(*ids, "chat", 0.0, span_id=span_id, attributes=call))
    await loop.finish(rollout, version=loop.version)
    return spans


async def test_branches_are_queued_once_the_others_have_ended_and_again_by_a_resumed_run(
    store: InMemoryLightningStore, finish: Any
) -> None:
    loop, request = Loop(store, finish, max_staleness=0), RolloutRequest([Want(n=4)])
    loop.source.curriculum = BRANCHING
    collecting = asyncio.create_task(loop.source.next(request))
    first = {rollout.rollout_id: (await two_calls(loop, rollout))[0] for rollout in await loop.claim(2)}
    branches = await loop.claim(2)
    assert len({group_of(rollout) for rollout in branches}) == 1, "of the group that they branch off"
    for rollout in branches:
        source = rollout.metadata["branch"]["rollout_id"]
        assert rollout.metadata["branch"]["span_ids"] == [first[source]]
    collecting.cancel()

    after = loop.killed(step=0, version=0)
    after.source.curriculum = loop.source.curriculum
    collecting = asyncio.create_task(after.source.next(request))
    for rollout in branches:
        await two_calls(loop, rollout)
    collected = await asyncio.wait_for(collecting, 30)
    assert len(collected.trajectories) == 4
    assert collected.metrics["branches"] == 2
    assert await store.dequeue_rollout() is None, "nothing ran twice"


# -- wants -----------------------------------------------------------------------------------------------------------


async def test_named_tasks_are_run_beside_the_next_one_and_found_again_by_a_resumed_run(
    store: InMemoryLightningStore, finish: Any
) -> None:
    request = RolloutRequest([Want(task=5, n=3), Want(), Want(task=TASKS[2])])
    loop = Loop(store, finish, max_staleness=0)
    collecting = asyncio.create_task(loop.source.next(request))
    (following,) = await loop.claim(1)
    await finish(following, version=0)
    named = await loop.claim(4)
    assert sorted(rollout.input["n"] for rollout in named) == [2, 5, 5, 5]
    await finish(named[0], version=0)
    collecting.cancel()

    after = loop.killed(step=0, version=0)
    collecting = asyncio.create_task(after.source.next(request))
    for rollout in named[1:]:
        await finish(rollout, version=0)
    collected = await asyncio.wait_for(collecting, 30)
    assert collected.rollouts == 5
    assert groups_of(collected) == ["000001-0000", "000001-task0002", "000001-task0005"]
    assert await store.dequeue_rollout() is None, "nothing ran twice"


async def test_named_tasks_take_no_place_of_the_runs_own_order(store: InMemoryLightningStore, finish: Any) -> None:
    loop, batches = Loop(store, finish, max_staleness=0), list[list[str]]()
    for request in (RolloutRequest([Want(task=0)]), REQUEST):
        collecting = asyncio.create_task(loop.source.next(request))
        for rollout in await loop.claim(sum(want.n for want in request.wants)):
            await finish(rollout, version=0)
        batches.append(groups_of(await collecting))
    assert batches == [["000001-task0000"], ["000001-0000", "000001-0001"]]


async def test_a_tree_grows_at_the_calls_that_are_named(store: InMemoryLightningStore, finish: Any) -> None:
    loop, known = Loop(store, finish, max_staleness=0), dict[str, list[str]]()

    async def collect(*wants: Want) -> Collected:
        collecting = asyncio.create_task(loop.source.next(RolloutRequest(wants)))
        for rollout in await loop.claim(sum(want.n for want in wants)):
            known[rollout.rollout_id] = await two_calls(loop, rollout)
        return await asyncio.wait_for(collecting, 30)

    (root,) = (await collect(Want())).trajectories
    first, second = known[root.rollout_id]
    grown = await collect(
        Want(branch=BranchPoint(root.rollout_id, second), n=2), Want(branch=BranchPoint(root.rollout_id, first))
    )
    assert {each.group for each in grown.trajectories} == {root.group}
    assert [each.task for each in grown.trajectories] == [root.task] * 3
    assert grown.metrics["branches"] == 2, "the one at the first call shares nothing but the task"
    places = {each.rollout_id.split("-")[-2] for each in grown.trajectories}
    assert len(places) == 2, "ids name the place: a step that resumes with other wants takes none of these"
    leaf = grown.trajectories[0].rollout_id
    (deeper,) = (await collect(Want(branch=BranchPoint(leaf, known[leaf][1])))).trajectories
    made = await store.get_rollout_by_id(deeper.rollout_id)
    assert made is not None
    assert made.metadata["branch"] == {"rollout_id": leaf, "span_ids": [known[leaf][0]]}
    inside = BranchPoint(root.rollout_id, second, kept=1)
    (goes_on,) = (await collect(Want(branch=inside))).trajectories
    made = await store.get_rollout_by_id(goes_on.rollout_id)
    assert made is not None
    assert made.metadata["branch"] == {"rollout_id": root.rollout_id, "span_ids": [first], "kept": {second: 1}}
    loop.train()
    with pytest.raises(ValueError, match=rf"{root.rollout_id}, which is 1 updates old; run.max_staleness=0"):
        await loop.source.next(RolloutRequest([Want(branch=BranchPoint(root.rollout_id, second))]))


@pytest.mark.parametrize(
    ("want", "message"),
    [
        (Want(task=8), "task 8 is none of the run's 8 training tasks"),
        (Want(task={"n": 99}), r"task \{'n': 99\} is none"),
        (Want(branch=BranchPoint("r-train-000009-0000-000", "s")), "no training rollout 'r-train-000009-0000-000'"),
        (Want(branch=BranchPoint("other", "s")), "no training rollout 'other' in this run"),
    ],
)
async def test_what_does_not_exist_is_named_before_anything_runs(
    store: InMemoryLightningStore, finish: Any, want: Want, message: str
) -> None:
    loop = Loop(store, finish, max_staleness=1)
    with pytest.raises(ValueError, match=message):
        await loop.source.next(RolloutRequest([Want(n=2), want]))
    assert await store.query_rollouts() == []
    collecting = asyncio.create_task(loop.killed(step=0, version=0).source.next(REQUEST))
    for rollout in await loop.claim(8):
        await finish(rollout, version=0)
    assert len((await collecting).trajectories) == 4, "a run that is resumed goes on"


async def test_a_call_that_a_rollout_does_not_have_is_named(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=0)
    collecting = asyncio.create_task(loop.source.next(RolloutRequest([Want()])))
    (rollout,) = await loop.claim(1)
    await finish(rollout, version=0)
    await collecting
    with pytest.raises(ValueError, match=f"off rollout {rollout.rollout_id} at call 'gone': its calls"):
        await loop.source.next(RolloutRequest([Want(branch=BranchPoint(rollout.rollout_id, "gone"))]))
    call = (await store.query_spans(rollout.rollout_id))[0].span_id
    for kept in (-1, 1):
        with pytest.raises(ValueError, match=f"after {kept} tokens of call '{call}': its answer has 1, and the last"):
            await loop.source.next(RolloutRequest([Want(branch=BranchPoint(rollout.rollout_id, call, kept=kept))]))


@pytest.mark.parametrize(
    "wants",
    [[Want(task=3)], [Want(branch=BranchPoint("ro-1", "span-1"))], [Want(n=2), Want(n=4)]],
    ids=["task", "branch", "sizes"],
)
def test_recorded_rollouts_cannot_be_chosen(wants: list[Want]) -> None:
    with pytest.raises(ConfigError, match="recorded rollouts come as they are"):
        _ = RolloutRequest(wants).tasks
    assert RolloutRequest([Want(n=4)] * 3).tasks == 3


def test_a_want_of_nothing_or_of_two_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="n is 1 or more"):
        Want(n=0)
    with pytest.raises(ValueError, match="two tasks"):
        Want(task=1, branch=BranchPoint("r", "s"))


# -- flow, continued -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
async def test_agents_of_all_speeds_are_learned_from_once_and_in_time(
    store: InMemoryLightningStore, finish: Any, max_staleness: int
) -> None:
    loop = Loop(store, finish, max_staleness, total_steps=8)
    chance = random.Random(max_staleness)
    batches, seen, ages = await run(loop, 8, 16, lambda rollout: 0.002 * 20 ** chance.random())
    taken = Counter(group for batch in batches for group in batch)
    assert taken == Counter(f"{turn + 1:06d}-{index:04d}" for turn in range(8) for index in range(2))
    assert set(seen.values()) == {1}, "no rollout ran twice"
    assert max(ages) <= max_staleness


async def test_rollouts_that_wait_for_a_runner_do_not_age(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=1, total_steps=6)
    _, seen, ages = await run(loop, 6, 1, lambda rollout: 0)
    assert set(seen.values()) == {1}
    assert max(ages) <= 1


async def test_nothing_runs_beyond_the_last_step(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=2, total_steps=2)
    collecting = asyncio.create_task(loop.source.next(REQUEST))
    for rollout in await loop.claim(8):
        await finish(rollout)
    await collecting
    assert [name for name, _ in loop.published] == ["r-train-000001", "r-train-000002"]
    assert await store.dequeue_rollout() is None


async def test_a_second_request_within_a_step_runs_its_own(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=0)
    for prefix in ("000001-0000", "000001-task"):
        collecting = asyncio.create_task(loop.source.next(REQUEST))
        for rollout in await loop.claim(4):
            await finish(rollout)
        assert groups_of(await collecting)[0].startswith(prefix)


async def test_further_requests_branch_as_well(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=0)
    loop.source.curriculum = BRANCHING
    for _ in range(2):
        collecting = asyncio.create_task(loop.source.next(REQUEST))
        for count in (2, 2):
            for rollout in await loop.claim(count):
                await two_calls(loop, rollout)
        collected = await collecting
        assert len(collected.trajectories) == 4
        assert collected.metrics["branches"] == 2


# -- staleness -------------------------------------------------------------------------------------------------------


async def test_a_group_that_became_too_old_is_counted_and_its_task_runs_again(
    store: InMemoryLightningStore, finish: Any
) -> None:
    loop = Loop(store, finish, max_staleness=1, total_steps=1)
    loop.version = 3
    collecting = asyncio.create_task(loop.source.next(REQUEST))
    for rollout in await loop.claim(4):
        await finish(rollout, version=1 if group_of(rollout) == "000001-0001" else 2)
    again = await loop.claim(2)
    assert {rollout.rollout_id for rollout in again} == {f"r-train-000001-0001-00{m}-fresh1" for m in range(2)}
    assert {rollout.input["n"] for rollout in again} == {rollout.input["n"] for rollout in again[:1]}
    for rollout in again:
        await finish(rollout, version=3)
    collected: Collected = await collecting
    assert groups_of(collected) == ["000001-0000", "000001-0001"]
    assert not collected.rejected
    assert collected.metrics["groups_stale"] == 1
    assert len(loop.notes) == 1
    assert "older than max_staleness=1" in loop.notes[0]


# -- failures --------------------------------------------------------------------------------------------------------


async def test_agents_that_die_complete_their_group(store: InMemoryLightningStore, finish: Any) -> None:
    loop = Loop(store, finish, max_staleness=1)
    collecting = asyncio.create_task(loop.source.next(REQUEST))
    for number, rollout in enumerate(await loop.claim(8)):
        if number == 0:
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        else:
            await finish(rollout)
    collected = await collecting
    assert len(collected.failed) == 1
    assert len(collected.trajectories) == 3


async def test_too_many_deaths_stop_the_run_before_slow_agents_finish(
    store: InMemoryLightningStore, finish: Any
) -> None:
    loop = Loop(store, finish, max_staleness=1)
    collecting = asyncio.create_task(loop.source.next(REQUEST))
    claimed = await loop.claim(8)
    for rollout in [*claimed[::2], claimed[1]]:
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
    with pytest.raises(TrainingStopped, match="5 of 8 rollouts failed"):
        await collecting


def test_more_staleness_than_steps_is_refused() -> None:
    LightningRL(steps=3).check_staleness(3)
    with pytest.raises(ConfigError, match=r"run.max_staleness=4 is more than the 3 steps"):
        LightningRL(steps=3).check_staleness(4)


# -- the engine's load -----------------------------------------------------------------------------------------------


async def test_an_overloaded_engine_has_the_youngest_groups_cancelled_and_run_later(
    store: InMemoryLightningStore, finish: Any
) -> None:
    loop = Loop(store, finish, max_staleness=3)
    loop.usage = 0.95
    collecting = asyncio.create_task(loop.source.next(REQUEST))
    claimed = await loop.claim(16)
    await asyncio.wait_for(loop.noted.wait(), 10)
    cancelled = {r.rollout_id for r in await store.query_rollouts(status_in=["cancelled"])}
    assert cancelled == {r.rollout_id for r in claimed if group_of(r) >= "000003-0001"}, "5 of 8 groups fill 0.7"
    for rollout in claimed:
        if rollout.rollout_id not in cancelled:
            await finish(rollout, version=0)
    collected = await collecting
    assert groups_of(collected) == ["000001-0000", "000001-0001"]
    assert collected.metrics["groups_cancelled"] == 3
    again = await loop.claim(4)
    assert {group_of(rollout) for rollout in again} <= {group_of(r) for r in claimed if r.rollout_id in cancelled}


# -- resuming --------------------------------------------------------------------------------------------------------


async def test_a_resumed_run_does_not_count_what_had_finished_in_its_speed(
    store: InMemoryLightningStore, finish: Any
) -> None:
    before = Loop(store, finish, max_staleness=0, total_steps=1)
    collecting = asyncio.create_task(before.source.next(REQUEST))
    for rollout in await before.claim(4):
        await finish(rollout, version=0)
    first = await collecting
    assert (first.sampled_before, first.sampled_tokens > 0) == (0, True)
    after = before.killed(step=0, version=0)
    again = await asyncio.wait_for(after.source.next(REQUEST), 10)
    assert again.sampled_before == again.sampled_tokens == first.sampled_tokens
    line = step_line(after.state, again, {})
    assert (line["sampled_tokens"], line["tokens_per_second"]) == (first.sampled_tokens, 0.0)


async def test_a_resumed_run_takes_each_group_once_and_runs_nothing_twice(
    store: InMemoryLightningStore, finish: Any
) -> None:
    """Killed while a step trains: the groups it learned from are taken again, and so are complete ones ahead of it."""
    before = Loop(store, finish, max_staleness=1, total_steps=3)
    seen = Counter[str]()
    collecting = asyncio.create_task(before.source.next(REQUEST))
    claimed = await before.claim(8)
    for rollout in claimed:
        seen[rollout.rollout_id] += 1
        if group_of(rollout) != "000001-0000":
            await finish(rollout, version=0)
    first = groups_of(await collecting)
    before.train()
    await asyncio.wait_for(asyncio.gather(before.source.next(REQUEST), finish_all(before, claimed)), 10)
    after = before.killed(step=1, version=7)
    after.state.resumes.append([1, 7])
    await after.source.collector.recover("r", "killed")
    batches, again, _ = await run(after, 3, 2, lambda rollout: 0)
    taken = Counter([*first, *(group for batch in batches for group in batch)])
    assert taken == Counter(f"{turn + 1:06d}-{index:04d}" for turn in range(3) for index in range(2))
    assert not seen & again, "what had finished was used"


async def finish_all(loop: Loop, claimed: list[AttemptedRollout]) -> None:
    for rollout in claimed:
        if group_of(rollout) == "000001-0000":
            await loop.finish(rollout, version=0)


async def test_what_had_finished_before_a_kill_is_used_while_it_is_young_enough(
    store: InMemoryLightningStore, finish: Any
) -> None:
    """Two turns sampled before the first update finished after a younger one."""
    before = Loop(store, finish, max_staleness=2)
    collecting = asyncio.create_task(before.source.next(REQUEST))
    old = await before.claim(12)
    for rollout in old[:4]:
        await finish(rollout, version=0)
    await collecting
    before.train()
    collecting = asyncio.create_task(before.source.next(REQUEST))
    for rollout in [*(await before.claim(4)), *old[4:]]:
        await finish(rollout, version=0 if rollout in old else 1)
    await collecting
    after = before.killed(step=1, version=5)
    after.state.resumes.append([1, 5])
    batches, again, ages = await run(after, 4, 1, lambda rollout: 0)
    assert [name[:6] for batch in batches[:2] for name in batch] == ["000002"] * 2 + ["000003"] * 2
    assert not again, "nothing had to run"
    assert len(ages) == 12


async def test_a_resumed_run_runs_again_what_is_too_old(store: InMemoryLightningStore, finish: Any) -> None:
    before = Loop(store, finish, max_staleness=1)
    before.version = 9
    collecting = asyncio.create_task(before.source.next(REQUEST))
    for rollout in await before.claim(8):
        await finish(rollout, version=5 if group_of(rollout) == "000002-0000" else 9)
    await collecting
    before.state.step = 1
    after = before.killed(step=1, version=10)
    collecting = asyncio.create_task(after.source.next(REQUEST))
    again: list[AttemptedRollout] = []
    while len(again) < 2:
        again += [rollout for rollout in await after.claim(1) if rollout.rollout_id.endswith("fresh1")]
    assert {group_of(rollout) for rollout in again} == {"000002-0000"}
    for rollout in again:
        await finish(rollout, version=10)
    collected = await collecting
    assert collected.metrics["groups_stale"] == 1
    assert groups_of(collected) == ["000002-0000", "000002-0001"]


@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
async def test_many_updates_leave_no_group_behind_and_keep_nothing(
    store: InMemoryLightningStore, finish: Any, steps: int
) -> None:
    loop = Loop(store, finish, max_staleness=2, total_steps=steps)
    chance = random.Random(0)
    sizes: list[int] = []

    def seconds(rollout: AttemptedRollout) -> float:
        sizes.append(len(loop.state.taken) + len(loop.source._groups))  # pyright: ignore[reportPrivateUsage]
        return 0.0005 * 20 ** chance.random()

    batches, seen, ages = await run(loop, steps, 12, seconds)
    assert len({group for batch in batches for group in batch}) == 2 * steps
    assert set(seen.values()) == {1}
    assert max(ages) <= 2
    assert max(sizes) <= 2 * 2 * 3 + 2, "the state is no larger than what is under way"
