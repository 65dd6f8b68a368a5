"""The stream of rollouts: groups run while the policy trains, and each step learns from the first that are complete.

With `max_staleness=k`, at most k+1 steps' worth of groups are under way when a step begins, each with the weights that
are the newest when its rollouts call them. A step takes the first groups to complete (`choose`), and never one
with a token that is more than k updates old: such a group is counted (`groups_stale`), and its task runs again. With
k=0 the groups of a step are all that is under way: training is then synchronous.

Tasks come in turns of one step's worth, and a group is named after its place: `RUN-train-TURN-INDEX`. The run's state
records which groups were learned from, so a resumed run takes each of the others once, from the rollouts that exist.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from msgspec import Struct, field

from agentlightning.algorithms.training import BranchPoint, Collected, RolloutRequest, Want
from agentlightning.assemble import REPLAY_MISMATCHES, REPLAYED_CALLS, TURN_LIMIT, TURN_LIMIT_REACHED, transcript_of
from agentlightning.config import Branching, CurriculumConfig
from agentlightning.credit import group_trajectories
from agentlightning.credit.rejection import MISSING_REWARD, Check, Rejection, rejection
from agentlightning.errors import DatasetError, MissingRewardError, NotFoundError, RewardError
from agentlightning.policy.learner import Learner, age, updates_of
from agentlightning.rewards.judges import JudgedRollout
from agentlightning.rollouts import BRANCH, Rollout
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import tasks_of_step
from agentlightning.tracing.rewards import check_reward
from agentlightning.training.persistence.run_dir import RunState, TaskRecord
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan, checked, read_recordings
from agentlightning.trajectory import Reward, Trajectory, Transition
from agentlightning.util.event_loop import in_background
from agentlightning.util.progress import Progress

# -- branching -------------------------------------------------------------------------------------------------------

# Where further rollouts of a group branch off: at answers that the policy is unsure of, after the result of a tool.
#
# With u(call) the mean of -log p over the first tokens of an answer, each an estimate of the entropy it was drawn with,
# a rollout may branch at a call if
#
#     u(call) - u(first call) > threshold
#
# (entropy-based adaptive rollouts of ARPO, Dong et al. 2025, arXiv:2507.19849; the paper measures the entropy itself).
# The rollouts that a group has left branch at the points where it rises most, in turn.


Collect = Callable[[RolloutRequest], Awaitable[Collected]]


async def collect_branched(collect: Collect, request: RolloutRequest, config: Branching) -> Collected:
    """What is requested, a share of each group branching off the rest of it. A request that names branches itself, or
    whose wants differ in size, is carried out as it is."""
    size = request.group_size
    later = min(round(config.share * size), size - 1)
    if later < 1 or any(want.branch or want.n < size for want in request.wants):
        return await collect(request)
    first = await collect(replace(request, wants=[replace(want, n=size - later) for want in request.wants]))
    groups = group_trajectories(first.trajectories)
    wants = [want for group in groups for want in branch_wants(group, later, config)]
    return first + await collect(replace(request, wants=wants)) if wants else first


def branch_wants(group: Sequence[Trajectory], count: int, config: Branching) -> list[Want]:
    """`count` rollouts that branch off a group at its points in turn, those with the largest rise first. Where it has
    none, they branch off the first call: they are independent."""
    rises = sorted(_points(group, config), key=lambda each: -each[0])
    first = [BranchPoint(each.rollout_id, each.transitions[0].span_id) for each in group if each.transitions]
    points = [point for _, point in rises] or first[:1]
    return [Want(branch=points[i % len(points)]) for i in range(count if points else 0)]


def _points(group: Sequence[Trajectory], config: Branching) -> Iterator[tuple[float, BranchPoint]]:
    """(rise of the uncertainty over that of the first call, in nats a token; the call)."""
    for trajectory in group:
        for call in trajectory.transitions[1:]:
            rise = _uncertainty(call, config.tokens) - _uncertainty(trajectory.transitions[0], config.tokens)
            after_tool = any(message.get("role") == "tool" for message in call.observation)
            if rise > config.threshold and (config.after == "any" or after_tool):
                yield rise, BranchPoint(trajectory.rollout_id, call.span_id)


def _uncertainty(call: Transition, tokens: int) -> float:
    return -statistics.fmean(call.logprobs[:tokens]) if call.logprobs else 0.0


# -- group rewards ---------------------------------------------------------------------------------------------------

# Rewards that come from a function of each group, such as a judge that ranks its rollouts.
#
# The function gets the rollouts of a group (`JudgedRollout`) and returns one reward for each, None for none; it may be
# async. Where it raises, the rollouts of the group have no reward: they are rejected, counted and named like others.

JUDGED_AT_ONCE = 4
"""Groups that are judged at the same time."""
GroupReward = Callable[[Sequence[JudgedRollout]], Any]


async def judged(
    collect: Collect, request: RolloutRequest, function: GroupReward, store: LightningStoreBase
) -> Collected:
    """What is requested, with the rewards that a function of each group gives."""
    collected = await collect(replace(request, check=None))
    limit = asyncio.Semaphore(JUDGED_AT_ONCE)

    async def judge(group: Sequence[Trajectory]) -> list[Trajectory | Rejection]:
        async with limit:
            return await _judge(group, function, store)

    groups = await asyncio.gather(*map(judge, group_trajectories(collected.trajectories)))
    found = [each for group in groups for each in group]
    usable, rejected = await checked(found, request.check)
    missing = sum(isinstance(each, Rejection) for each in found)
    return replace(
        collected,
        trajectories=usable,
        rejected=(*collected.rejected, *rejected),
        metrics={**collected.metrics, "group_rewards_missing": float(missing)},
    )


async def _judge(
    group: Sequence[Trajectory], function: GroupReward, store: LightningStoreBase
) -> list[Trajectory | Rejection]:
    """Each rollout with its reward, or why it has none."""
    try:
        recorded = await read_recordings(store, [each.rollout_id for each in group])
        rollouts = [
            JudgedRollout(each.rollout_id, each.task, own.output, transcript_of(own.spans))
            for each, own in zip(group, recorded.values(), strict=True)
        ]
        given = await asyncio.to_thread(function, rollouts)
        rewards: list[Reward | None] = list(await given if inspect.isawaitable(given) else given)
        if len(rewards) != len(group):
            raise RewardError(
                f"the group reward gave {len(rewards)} rewards for {len(group)} rollouts; give one for each"
            )
    except Exception as error:  # noqa: BLE001  The boundary of the user's function, which may raise anything.
        reason = str(error) if isinstance(error, MissingRewardError) else f"{type(error).__name__}: {error}"
        message = f"the group reward gave its group none: {reason}"
        return [Rejection(each.rollout_id, MISSING_REWARD, message) for each in group]
    found: list[Trajectory | Rejection] = []
    for each, reward in zip(group, rewards, strict=True):
        try:
            if reward is None:
                raise MissingRewardError(f"the group reward gave rollout {each.rollout_id} none")
            found.append(replace(each, reward=check_reward(reward, "the group reward"), agent_rewards={}))
        except RewardError as error:
            found.append(rejection(each.rollout_id, error))
    return found


# -- task order ------------------------------------------------------------------------------------------------------

# The order of tasks: every task once an epoch, or those first from which the policy can learn now.
#
# `LearnabilityOrder` draws a task with the probability
#
#     P(i) = (1 - rho) S(i) / sum(S)  +  rho C(i) / sum(C)
#     S(i) = std(i) + max(0, best(i) - mean(i)),     C(i) = turns since task i was drawn
#
# after Prioritized Level Replay (Jiang et al. 2021, arXiv:2010.03934, equation 2, with scores in proportion instead of
# ranks). mean and std are moving averages of the rewards of the task's groups, best is the highest mean so far: a task
# whose rollouts differ is learnable (Rutherford et al. 2024, arXiv:2408.15099, section 4), and one that the policy has
# forgotten is again. Tasks that nobody has tried come first, for a share of each turn. Of a task whose groups have had
# no reward so far nothing is known: it has the mean score of the others.


class LearnabilityOrder(Struct):
    """Tasks in proportion to what can be learned from them now. `state` is the part of the run's state that it keeps:
    what is known of each task, by its place."""

    number: int
    """Of tasks."""
    seed: int
    config: CurriculumConfig
    state: dict[int, TaskRecord]
    _shuffled: list[int] = []

    def __post_init__(self) -> None:
        if self.number < 1:
            raise DatasetError("there are no tasks to draw from; at least one is needed")
        self._shuffled = list(range(self.number))
        random.Random(f"{self.seed}:0").shuffle(self._shuffled)

    def draw(self, turn: int, count: int) -> list[int]:
        rng = random.Random(f"{self.seed}:turn:{turn}")
        untried = [index for index in self._shuffled if index not in self.state]
        tried = [index for index, record in self.state.items() if record.groups or record.unrewarded]
        fresh = untried[: max(count - len(tried), round(self.config.untried_share * count))]
        known = {index: self.state[index] for index in tried}
        rewarded = [record.score for record in known.values() if record.groups]
        unknown = statistics.fmean(rewarded) if rewarded else 0.0
        scores = {index: record.score if record.groups else unknown for index, record in known.items()}
        ages = {index: max(1.0, turn - record.turn) for index, record in known.items()}
        total, age = sum(scores.values()), sum(ages.values())
        rho = self.config.staleness_share if total > 0 else 1.0

        def key(index: int) -> tuple[float, float]:
            share = (1 - rho) * scores[index] / (total or 1.0) + rho * ages[index] / age
            return (math.log(1 - rng.random()) / share if share else -math.inf), rng.random()

        # Those with the highest keys log(u) / P(i), u being random, are different ones drawn by P(i) (Efraimidis and
        # Spirakis, Information Processing Letters 97, 2006).
        drawn = [*fresh, *sorted(tried, key=key, reverse=True)[: count - len(fresh)]]
        while len(drawn) < count:  # Fewer tasks than a turn takes: some are drawn twice.
            drawn.append(rng.choice(self._shuffled))
        for index in drawn:
            self.state.setdefault(index, TaskRecord()).turn = turn
        return drawn

    def observe(self, index: int, rewards: Sequence[float]) -> None:
        self.state.setdefault(index, TaskRecord()).add(rewards)

    def metrics(self) -> dict[str, float]:
        tried = [record for record in self.state.values() if record.groups]
        return {
            "curriculum_tasks_tried": float(len(tried)),
            "curriculum_tasks_with_spread": float(sum(record.std > 0 for record in tried)),
            "curriculum_tasks_forgotten": float(sum(record.is_forgotten for record in tried)),
        }


# -- in-flight limit -------------------------------------------------------------------------------------------------

# How many groups of rollouts run at the same time, by the load of the engine that answers them.
#
# Additive-increase rules of networks, with factors, as in prime-rl: while the key-value cache is less than 0.6 full,
# the limit grows by 1.25 for each turnover (as many groups finished as the limit allows); above 0.8 it shrinks to what
# fills 0.7, and groups beyond it that no runner has begun wait; above 0.9 the youngest groups beyond it are cancelled,
# and run again later. One group may always run.

GROW_BELOW = 0.6
GROWTH = 1.25
TRIM_ABOVE = 0.8
TRIM_TO = 0.7
CANCEL_ABOVE = 0.9
READ_SECONDS = 1.0
"""How often the load is read."""
SETTLE_SECONDS = 10.0
"""After the limit has shrunk: time until runners have stopped what was cancelled, and the load shows it."""

Usage = Callable[[], Awaitable[float | None]]
"""The share of the engine's key-value cache that is in use; None: unknown."""


async def unknown_usage() -> float | None:
    """Of an engine that does not report it."""
    return None


class InFlightLimit(Struct):
    """The number of groups that may run at the same time; no limit until the engine is first overloaded."""

    usage: Usage = unknown_usage
    groups: float = math.inf
    clock: Callable[[], float] = time.monotonic
    peak: float | None = None
    """The highest load since it was last reset; None: the engine has reported none."""
    _recent: float | None = None
    """The highest load since `load` was last called."""
    _shrunk: float = -math.inf
    """When the limit last shrank."""
    _finished: int = 0
    """Groups that finished since the limit last changed."""

    def count(self, finished: int) -> None:
        """Groups that have finished."""
        self._finished += finished

    async def read(self) -> None:
        """Read the load every `READ_SECONDS`."""
        while True:
            if (used := await self.usage()) is not None:
                self.peak = max(used, self.peak or 0.0)
                self._recent = max(used, self._recent or 0.0)
            await asyncio.sleep(READ_SECONDS)

    def load(self) -> float | None:
        """The highest share of the cache in use since the last call; None where none was read."""
        used, self._recent = self._recent, None
        return used

    def is_overload(self, used: float) -> bool:
        """Whether the limit is to shrink now."""
        return used > TRIM_ABOVE and self.clock() >= self._shrunk + SETTLE_SECONDS

    def shrink(self, used: float, running: int) -> None:
        """Allow the groups that fill `TRIM_TO` of the cache, where `running` groups fill `used`."""
        self._set(max(1, min(self.groups, math.floor(running * TRIM_TO / used))))
        self._shrunk = self.clock()

    def grow(self, used: float, most: int) -> None:
        """Allow more groups, up to `most`, where the cache has room and as many have finished as were allowed."""
        if used < GROW_BELOW and self.groups < most and self._finished >= self.groups:
            self._set(min(most, self.groups * GROWTH))

    def _set(self, groups: float) -> None:
        if groups != self.groups:
            self.groups, self._finished = groups, 0

    def metrics(self) -> dict[str, float]:
        """`kv_cache_usage`, the highest since the last call, and `groups_limit`; what is unknown is left out."""
        found = {} if self.peak is None else {"kv_cache_usage": self.peak}
        self.peak = None
        return found if self.groups == math.inf else {**found, "groups_limit": float(int(self.groups))}


# -- schedule --------------------------------------------------------------------------------------------------------

# Which groups of rollouts a training step takes: the first that are complete, none too old, no slow one left behind.
#
# Weights change once a step, and a group may be learned from at most `max_staleness` updates after it began. With so
# many groups under way as that allows, some steps must take the groups that began first, or these would be too old
# later. A step therefore takes, in order of completion, the earliest deadlines as far as the capacity of the coming
# steps demands it (earliest deadline first: Liu and Layland 1973, section 7), and then whatever is complete.


def choose(groups: Sequence[Group], count: int, update: int) -> list[Group] | None:
    """The `count` groups that update number `update` learns from; None while the ones it needs still run.

    Of the groups whose deadline is `update + i` or earlier, the updates after this one can take `i * count`; this one
    takes the rest. A group whose deadline has passed binds no step: it is taken when it completes, or found too old.
    """
    complete = sorted(
        (group for group in groups if group.completed is not None), key=lambda group: group.completed or 0
    )
    if len(complete) < count:
        return None
    chosen: list[Group] = []
    for deadline in sorted({group.deadline for group in groups if group.deadline >= update}):
        due = [group for group in groups if update <= group.deadline <= deadline]
        missing = min(count, len(due) - (deadline - update) * count) - len(chosen)
        if missing <= 0:
            continue
        ready = [group for group in complete if update <= group.deadline <= deadline and group not in chosen]
        if len(ready) < missing:
            return None
        chosen += ready[:missing]
    rest = [group for group in complete if group not in chosen]
    return chosen + rest[: count - len(chosen)]


Publish = Callable[[str, Mapping[str, float], int | None], Awaitable[str]]
"""(resources id, sampling parameters, answers that a rollout may be given) -> the id under which the present weights
and resources were published."""
PART_SEED = 1_000_003
"""What is added to the seed for each further request within a step, so that it draws other tasks."""


class Group(Struct, eq=False):
    """The rollouts of one task of a turn."""

    turn: int
    index: int
    plans: Sequence[RolloutPlan]
    deadline: int = 0
    """The last update that may learn from it."""
    task: int = 0
    """The place of its task among all tasks."""
    ended: dict[str, Rollout] = {}
    """Its finished rollouts by id, the failed ones included."""
    completed: float | None = None
    """When the last of them ended."""
    reruns: int = 0
    """How often it was too old and ran again."""

    @property
    def key(self) -> str:
        return f"{self.turn}/{self.index}"

    @property
    def name(self) -> str:
        return self.plans[0].group

    @property
    def running(self) -> list[RolloutPlan]:
        """Its rollouts that have not finished."""
        return [plan for plan in self.plans if plan.rollout_id not in self.ended]


class RolloutStream(Struct):
    """Keeps groups of rollouts under way, and gives each step the first that are complete."""

    collector: RolloutCollector
    tasks: Sequence[Any]
    state: RunState
    publish: Publish
    progress: Progress
    learner: Learner | None = None
    """None: rollouts call no weights that a version is known of."""
    curriculum: CurriculumConfig = CurriculumConfig()
    seed: int = 0
    max_staleness: int = 0
    """Updates by which a token may be older than the weights that learn from it."""
    total_steps: int = 1
    """No groups are started for later steps, unless one asks for them."""
    group_reward: GroupReward | None = None
    """A function of a group, whose rewards replace those of its rollouts."""
    limit: InFlightLimit = field(default_factory=InFlightLimit)
    _order: LearnabilityOrder | None = None
    """Which tasks come next. None: every task once an epoch."""
    _groups: list[Group] = []
    """Those that are under way or complete, in the order of their turns."""
    _cancelled: list[Group] = []
    """Those that were cancelled for the engine's load, to be started first."""
    _place: tuple[int, int] | None = None
    """(turn, index) of the next group to start."""
    _requests: Counter[int] = field(default_factory=Counter[int])
    """By step."""
    _served: int = -1
    """The step that has had its groups of the run's order."""
    _limited: bool = False
    """Whether groups wait for `limit`, and for nothing else."""
    _counts: Counter[str] = field(default_factory=Counter[str])
    """What happened to groups during this step."""
    _noted: set[str] = set()
    _began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        """Raises DatasetError where there are no tasks to draw from."""
        if self.curriculum.tasks == "learnability":
            self._order = LearnabilityOrder(len(self.tasks), self.seed, self.curriculum, self.state.curriculum)

    async def next(self, request: RolloutRequest) -> Collected:
        """What is wanted: the first wants of a step for the run's next tasks are the groups of that step, in the order
        of their turns. Named tasks, branches and further requests within the step run at once, with the present
        weights."""
        branching, collect = self.curriculum.branching, self._collect
        if branching is not None:
            collect = partial(collect_branched, collect, config=branching)
        if self.group_reward is None:
            return await collect(request)
        return await judged(collect, request, self.group_reward, self.collector.store)

    async def recall(
        self, groups: Mapping[str, str], check: Check | None, tasks: Mapping[str, Any], max_age: int
    ) -> tuple[Trajectory, ...]:
        """See `Training.recall`. The store may have removed some: each is read by itself."""
        found: list[Trajectory] = []
        for key, group in groups.items():
            with suppress(NotFoundError):
                usable, _ = await self.collector.reader.read([RolloutPlan(key, tasks.get(key), group)], check)
                found += [each for each in usable if self._age(each) <= max_age]
        return tuple(found)

    async def _collect(self, request: RolloutRequest) -> Collected:
        step = self.state.step
        part = self._requests[step]
        self._requests[step] += 1
        following = [want for want in request.wants if want.is_next]
        named = [want for want in request.wants if not want.is_next]
        if self._served == step and following:
            tasks = tasks_of_step(len(self.tasks), len(following), step, self.seed + PART_SEED * part)
            named += [replace(want, task=task) for want, task in zip(following, tasks, strict=True)]
        plans = await self._named(named, step, part)
        collected = Collected(())
        if following and self._served != step:
            self._served = step
            collected = await self._next_groups(replace(request, wants=following), step)
        if not plans:
            return collected
        more = await self.collector.collect(
            plans,
            resources_id=await self._publish(f"{self.state.step_name(step)}-part{part}", request, step),
            check=request.check,
            timeout_reward=request.timeout_reward,
            on_progress=lambda done: self._show(done, len(plans)),
        )
        if any(want.branch for want in request.wants):
            metrics = {"branches": float(sum(BRANCH in plan.metadata for plan in plans))}
            for name in (REPLAYED_CALLS, REPLAY_MISMATCHES):
                metrics[name] = float(sum(each.metadata.get(name, 0) for each in more.trajectories))
            more = replace(more, metrics=metrics)
        return collected + more

    async def _next_groups(self, request: RolloutRequest, step: int) -> Collected:
        started, share = time.monotonic(), self.collector.max_failed_share
        self._counts.clear()
        await self._postpone_deadlines()
        while True:
            async with in_background(self.limit.read()):
                chosen = await self._wait(request)
            # Agents that die do so early: where other groups are still running, the share of failures is that of all
            # groups under way (`_wait`), and not of the first to complete.
            collected = await self.collector.collect(
                _plans_of(chosen),
                resources_id=None,
                check=request.check,
                timeout_reward=request.timeout_reward,
                max_failed_share=1.0 if self.max_staleness else share,
                max_rejected_share=share,
            )
            old = {each.group for each in collected.trajectories if self._age(each) > self.max_staleness}
            stale = [group for group in chosen if group.name in old]
            if not stale:
                break
            for group in stale:
                group.reruns += 1
                plans = self._plans(len(group.plans), group.name, group.task)
                group.plans = [replace(plan, rollout_id=f"{plan.rollout_id}-fresh{group.reruns}") for plan in plans]
            await self._queue(stale, request)
            self._counts["groups_stale"] += len(stale)
            self._note(
                "stale",
                f"group {stale[0].name} is older than max_staleness={self.max_staleness} updates: its task runs again",
            )
        self._take(chosen, step)
        ended = [each for group in chosen for each in group.ended.values()]
        earlier = {each.rollout_id for each in ended if (each.end_time or math.inf) < self._began}
        own = tuple(each for each in collected.trajectories if each.rollout_id in earlier)
        return replace(
            collected,
            seconds=time.monotonic() - started,
            sampled_before=replace(collected, trajectories=own).sampled_tokens,
            metrics=self._metrics(chosen, collected),
        )

    # -- starting ------------------------------------------------------------------------------------------------------

    async def _start(self, request: RolloutRequest) -> None:
        """Start groups while `max_staleness`, the engine's load and the steps that are left allow it."""
        starting: list[Group] = []
        drawn: dict[int, list[int]] = {}
        self._limited = False
        while (under_way := len(self._groups) + len(starting)) < (self.max_staleness + 1) * len(request.wants):
            running = sum(group.completed is None for group in self._groups) + len(starting)
            if running + 1 > self.limit.groups:
                self._limited = True
                break
            if self._cancelled:
                starting.append(self._cancelled.pop(0))
                continue
            place = self._next_place(request, needed=under_way < len(request.wants))
            if place is None:
                break
            turn, index = place
            if turn not in drawn:
                drawn[turn] = self._draw(turn, len(request.wants))
            task = drawn[turn][index]
            name = f"{self.state.step_name(turn)}{self.state.suffix}-{index:04d}"
            if self._order is not None:  # A run that is resumed from an earlier state may draw another task.
                name += f"-task{task}"
            plans = self._plans(request.wants[index].n, name, task)
            starting.append(Group(turn, index, plans, task=task))
        await self._queue(starting, request)
        self._groups += starting
        self._groups.sort(key=lambda group: (group.turn, group.index))

    def _next_place(self, request: RolloutRequest, *, needed: bool) -> tuple[int, int] | None:
        """The next group that no step has learned from. Beyond the tasks of the last step there is none, unless it is
        `needed` now."""
        state = self.state
        if self._place is None:  # What was taken by a step that was not finished is to be taken again.
            state.taken = {key: step for key, step in state.taken.items() if step < state.step}
            self._place = (state.step if state.first_turn is None else state.first_turn), 0
        turn, index = self._place
        while needed or turn < self.total_steps:
            if not index and turn >= state.turns and not self._groups:
                turn = max(turn, state.step)  # An algorithm may do steps without rollouts.
            self._place = (turn, index + 1) if index + 1 < len(request.wants) else (turn + 1, 0)
            if f"{turn}/{index}" not in state.taken:
                return turn, index
            turn, index = self._place
        return None

    async def _queue(self, groups: Sequence[Group], request: RolloutRequest) -> None:
        """Queue the rollouts of groups that have none, or none any more, with the present weights."""
        for turn in dict.fromkeys(group.turn for group in groups):
            own = [group for group in groups if group.turn == turn]
            resources_id = await self._publish(self.state.step_name(turn), request, turn)
            queued = iter(await self.collector.enqueue(_plans_of(own), resources_id, check=request.check))
            for group in own:
                group.plans = [next(queued) for _ in group.plans]
                group.ended, group.completed, group.deadline = {}, None, self._update + self.max_staleness
            if turn < self.state.turns:  # What had finished, before a resume for example, is as old as it is.
                found = await self.collector.wait_for_some(_plans_of(own), 0)
                finished = {rollout.rollout_id for rollout in found if rollout.status == "succeeded"}
                for group in own:
                    ended = [plan for plan in group.plans if plan.rollout_id in finished]
                    trajectories, _ = await self.collector.reader.read(ended)
                    group.deadline -= max((self._age(each) for each in trajectories), default=0)
            self.state.turns = max(self.state.turns, turn + 1)

    def _draw(self, turn: int, count: int) -> list[int]:
        """The tasks of a turn: the same each time, in a resumed run as well."""
        if self._order is None:
            return tasks_of_step(len(self.tasks), count, turn, self.seed)
        drawn = self.state.turn_tasks.setdefault(str(turn), [])
        if len(drawn) < count:
            drawn += self._order.draw(turn, count - len(drawn))
        return drawn

    def _plans(self, size: int, name: str, task: int) -> list[RolloutPlan]:
        return [RolloutPlan(f"{name}-{member:03d}", self.tasks[task], name) for member in range(size)]

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _wait(self, request: RolloutRequest) -> list[Group]:
        """The groups that this step learns from, in the order of their turns, once they are complete."""
        total = sum(want.n for want in request.wants)
        while True:
            await self._start(request)
            chosen = choose(self._groups, len(request.wants), self._update)
            if chosen is not None:
                return sorted(chosen, key=lambda group: (group.turn, group.index))
            await self._observe()
            ended = [rollout for group in self._groups for rollout in group.ended.values()]
            self._show(min(len(ended), total), total)
            of = len(_plans_of(self._groups))
            await self.collector.check_failures(ended, of, timeout_reward=request.timeout_reward)
            await self._adapt(request)

    async def _observe(self) -> None:
        """Wait until a group may have completed, or a second has passed."""
        running = [group for group in self._groups if group.completed is None]
        plans = [group.running for group in running]
        found = await self.collector.wait_for_some([plan for each in plans for plan in each], min(map(len, plans)))
        ended = {rollout.rollout_id: rollout for rollout in found}
        for group in running:
            group.ended |= {plan.rollout_id: ended[plan.rollout_id] for plan in group.plans if plan.rollout_id in ended}
            if not group.running:
                group.completed = max(rollout.end_time or 0.0 for rollout in group.ended.values())
        self.limit.count(sum(group.completed is not None for group in running))

    async def _adapt(self, request: RolloutRequest) -> None:
        """Follow the engine's load. Of the groups beyond the limit, those that no runner has begun wait; where the
        cache is nearly full, those that began last are cancelled as well."""
        used = self.limit.load()
        if used is None:
            return
        if not self.limit.is_overload(used):
            if self._limited:
                self.limit.grow(used, (self.max_staleness + 1) * len(request.wants))
            return
        running = [group for group in self._groups if group.completed is None]
        waiting = await self._waiting()
        begun = [group for group in running if not waiting.issuperset(each.rollout_id for each in group.running)]
        if not begun:
            return
        self.limit.shrink(used, len(begun))
        lost = begun[int(self.limit.groups) :] if used > CANCEL_ABOVE else []
        for group in running:
            if group not in begun or group in lost:
                for plan in group.running:
                    await self.collector.store.cancel_rollout(plan.rollout_id)
                self._groups.remove(group)
                self._cancelled.append(group)
        if lost:
            self._counts["groups_cancelled"] += len(lost)
            self._note(
                "cancelled",
                f"{lost[0].name} and later groups are cancelled and run again later, as the engine's key-value cache is"
                " nearly full",
            )

    async def _waiting(self) -> set[str]:
        """The ids of the rollouts that no runner has begun."""
        found = await self.collector.store.query_rollouts(
            status_in=["queuing", "requeuing"], rollout_id_contains=f"{self.state.run_id}-train-"
        )
        return {rollout.rollout_id for rollout in found}

    async def _postpone_deadlines(self) -> None:
        """Groups of which no rollout has begun will be sampled with the present weights."""
        if not any(group.completed is None and not group.ended for group in self._groups):
            return
        waiting = await self._waiting()
        for group in self._groups:
            if all(plan.rollout_id in waiting for plan in group.plans):
                group.deadline = self._update + self.max_staleness

    # -- taking --------------------------------------------------------------------------------------------------------

    def _age(self, trajectory: Trajectory) -> int:
        if (learner := self.learner) is None:
            return 0
        return age(trajectory, learner.policy_version, self.state.resumes, learner.versions)

    def _take(self, chosen: Sequence[Group], step: int) -> None:
        """Record that `step` learns from these groups. What is recorded of a step that was not finished is undone by a
        resume, as the state then has an earlier step."""
        for group in chosen:
            self._groups.remove(group)
            self.state.taken[group.key] = step
        pending = [group.turn for group in (*self._groups, *self._cancelled)]
        first = min([*pending, *(group.turn for group in chosen), *(self._place or ())[:1]])
        self.state.first_turn = first
        self.state.taken = {key: at for key, at in self.state.taken.items() if int(key.partition("/")[0]) >= first}
        self.state.turn_tasks = {turn: drawn for turn, drawn in self.state.turn_tasks.items() if int(turn) >= first}

    def _metrics(self, chosen: Sequence[Group], collected: Collected) -> dict[str, float]:
        found = self.limit.metrics()
        limits = [each.metadata[TURN_LIMIT] for each in collected.trajectories if TURN_LIMIT in each.metadata]
        if limits:
            reached = sum(TURN_LIMIT_REACHED in each.metadata for each in collected.trajectories)
            found |= {"turn_limit": float(max(limits)), "rollouts_at_turn_limit": float(reached)}
        if self._order is not None:
            rewards: dict[str, list[float]] = {}
            for trajectory in collected.trajectories:
                reward = trajectory.score
                if reward is not None and math.isfinite(reward):
                    rewards.setdefault(trajectory.group, []).append(reward)
            for group in chosen:
                self._order.observe(group.task, rewards.get(group.name, ()))
            found |= self._order.metrics()
        if not self.max_staleness and not self._counts:
            return found
        counts = {"groups_stale": 0, "groups_cancelled": 0, **self._counts}
        return {**found, **counts, "groups_in_flight": sum(group.completed is None for group in self._groups)}

    # -- what runs at once ---------------------------------------------------------------------------------------------

    async def _named(self, wants: Sequence[Want], step: int, part: int) -> list[RolloutPlan]:
        """Of named tasks and branches. An id follows from what is wanted, so that a resumed step that asks for
        something else finds nothing that ran for another purpose."""
        name, plans, count = f"{self.state.step_name(step)}{self.state.suffix}", list[RolloutPlan](), Counter[str]()
        for want in wants:
            if want.branch is None:
                index = self._index(want.task)
                group, task, metadata = f"{name}-task{index:04d}", self.tasks[index], dict[str, Any]()
            else:
                group, task, branch = await self._branch(want.branch)
                metadata = {} if branch is None else {BRANCH: branch}
            place = blake2b(repr((group, want.branch)).encode(), digest_size=6).hexdigest()
            for member in range(count[place], count[place] + want.n):
                rollout_id = f"{name}-part{part}-{place}-{member:03d}"
                plans.append(RolloutPlan(rollout_id, task, group, metadata))
            count[place] += want.n
        return plans

    def _index(self, task: Any) -> int:
        """The place of a task that is given as its place, or itself. Raises ValueError."""
        if isinstance(task, int) and 0 <= task < len(self.tasks):
            return task
        found = next((index for index, own in enumerate(self.tasks) if own == task), None)
        if found is None:
            raise ValueError(
                f"task {task!r:.200} is none of the run's {len(self.tasks)} training tasks; name one of"
                " training.train_tasks, by its place from 0 or as it is there"
            )
        return found

    async def _branch(self, point: BranchPoint) -> tuple[str, Any, Mapping[str, Any] | None]:
        """(group, task, what the gateway reads) of rollouts that branch off here. Raises ValueError."""
        rollout = await self.collector.store.get_rollout_by_id(point.rollout_id)
        if rollout is None or not point.rollout_id.startswith(f"{self.state.run_id}-train-"):
            raise ValueError(f"there is no training rollout {point.rollout_id!r} in this run to branch off")
        group = str(rollout.metadata["group"])
        read, rejected = await self.collector.reader.read([RolloutPlan(point.rollout_id, rollout.input, group)])
        answers = {call.span_id: len(call.response_token_ids) for each in read for call in each.transitions}
        calls = [*answers]
        oldest = max(map(self._age, read), default=0)
        if rejected or point.call not in calls:
            why = rejected[0].message if rejected else f"its calls of the policy are {', '.join(calls) or 'none'}"
            raise ValueError(f"nothing can branch off rollout {point.rollout_id} at call {point.call!r}: {why}")
        if oldest > self.max_staleness:
            raise ValueError(
                f"nothing can branch off rollout {point.rollout_id}, which is {oldest} updates old; run.max_staleness="
                f"{self.max_staleness} allows no more than that"
            )
        if not 0 <= point.kept < max(1, answers[point.call]):
            raise ValueError(
                f"nothing can branch off rollout {point.rollout_id} after {point.kept} tokens of call {point.call!r}:"
                f" its answer has {answers[point.call]}, and the last one ends it"
            )
        branch: dict[str, Any] = {"rollout_id": point.rollout_id, "span_ids": calls[: calls.index(point.call)]}
        if point.kept:
            branch["kept"] = {point.call: point.kept}
        return group, rollout.input, branch if branch["span_ids"] or point.kept else None

    # -- small parts ---------------------------------------------------------------------------------------------------

    async def _publish(self, name: str, request: RolloutRequest, turn: int) -> str:
        limit = self.curriculum.turns
        return await self.publish(name, request.sampling_parameters, limit and limit.at(turn))

    @property
    def _update(self) -> int:
        """The number of updates behind the present weights."""
        return 0 if self.learner is None else updates_of(self.learner.policy_version, self.state.resumes)

    def _show(self, done: int, of: int) -> None:
        self.progress.update(self.state.stage_step, rollouts=f"{done}/{of}")

    def _note(self, kind: str, text: str) -> None:
        if kind not in self._noted:
            self._noted.add(kind)
            self.progress.note(f"{text}\n  further ones are counted: groups_{kind} in metrics.jsonl")


def _plans_of(groups: Iterable[Group]) -> list[RolloutPlan]:
    return [plan for group in groups for plan in group.plans]
