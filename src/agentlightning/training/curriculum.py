"""Which tasks come next, and where rollouts of a group branch off the others."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final

from msgspec import Struct

from agentlightning.algorithms.training import BranchPoint, Collected, RolloutRequest, Want
from agentlightning.config import Branching, CurriculumConfig
from agentlightning.credit import group_trajectories
from agentlightning.errors import DatasetError
from agentlightning.trajectory import Trajectory, Transition

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


async def collect_branched(
    collect: Callable[[RolloutRequest], Awaitable[Collected]], request: RolloutRequest, config: Branching
) -> Collected:
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
            if rise > config.threshold and (config.after == "any" or _follows_tool(call)):
                yield rise, BranchPoint(trajectory.rollout_id, call.span_id)


def _uncertainty(call: Transition, tokens: int) -> float:
    return -statistics.fmean(call.logprobs[:tokens]) if call.logprobs else 0.0


def _follows_tool(call: Transition) -> bool:
    return any(message.get("role") == "tool" for message in call.observation)


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

MEMORY: Final = 0.5
"""The weight of a new group in the moving averages of its task."""
FORGOTTEN: Final = 0.25
"""A mean this far below the best one, relative to it, counts as forgotten."""


@dataclass(slots=True)
class TaskRecord:
    """What is known of one task, as a list in `state.json`."""

    turn: float
    """When it was drawn last. Numbers are read back as floats."""
    groups: float = 0
    mean: float = 0.0
    std: float = 0.0
    best: float = 0.0
    unrewarded: float = 0
    """Groups without any reward."""

    @property
    def score(self) -> float:
        return self.std + max(0.0, self.best - self.mean)

    @property
    def is_forgotten(self) -> bool:
        return self.groups > 1 and self.best - self.mean > FORGOTTEN * max(abs(self.best), 1e-9)

    def add(self, rewards: Sequence[float]) -> None:
        if not rewards:
            self.unrewarded += 1
            return
        mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
        weight = MEMORY if self.groups else 1.0
        self.mean += weight * (mean - self.mean)
        self.std += weight * (std - self.std)
        self.best = max(self.best, self.mean) if self.groups else mean
        self.groups += 1


class LearnabilityOrder(Struct):
    """Tasks in proportion to what can be learned from them now. `state` is the part of the run's state that it keeps:
    task -> `TaskRecord`, as a list."""

    number: int
    """Of tasks."""
    seed: int
    config: CurriculumConfig
    state: dict[str, list[float]]
    _shuffled: list[int] = []

    def __post_init__(self) -> None:
        if self.number < 1:
            raise DatasetError("there are no tasks to draw from; at least one is needed")
        self._shuffled = list(range(self.number))
        random.Random(f"{self.seed}:0").shuffle(self._shuffled)

    def draw(self, turn: int, count: int) -> list[int]:
        rng = random.Random(f"{self.seed}:turn:{turn}")
        known = {int(index): TaskRecord(*values) for index, values in self.state.items()}
        untried = [index for index in self._shuffled if index not in known]
        tried = [index for index, record in known.items() if record.groups or record.unrewarded]
        fresh = untried[: max(count - len(tried), round(self.config.untried_share * count))]
        drawn = [*fresh, *self._by_score(known, tried, turn, count - len(fresh), rng)]
        while len(drawn) < count:  # Fewer tasks than a turn takes: some are drawn twice.
            drawn.append(rng.choice(self._shuffled))
        for index in drawn:
            record = known.get(index, TaskRecord(turn))
            record.turn = turn
            self._keep(index, record)
        return drawn

    def observe(self, index: int, rewards: Sequence[float]) -> None:
        record = TaskRecord(*self.state.get(str(index), [0]))
        record.add(rewards)
        self._keep(index, record)

    def metrics(self) -> dict[str, float]:
        tried = [record for values in self.state.values() if (record := TaskRecord(*values)).groups]
        return {
            "curriculum_tasks_tried": float(len(tried)),
            "curriculum_tasks_with_spread": float(sum(record.std > 0 for record in tried)),
            "curriculum_tasks_forgotten": float(sum(record.is_forgotten for record in tried)),
        }

    def _by_score(
        self, known: dict[int, TaskRecord], tried: Sequence[int], turn: int, count: int, rng: random.Random
    ) -> list[int]:
        """`count` different ones of the tried tasks, drawn by P(i): those with the highest keys log(u) / P(i), u being
        random (Efraimidis and Spirakis, Information Processing Letters 97, 2006)."""
        rewarded = [known[index].score for index in tried if known[index].groups]
        unknown = statistics.fmean(rewarded) if rewarded else 0.0
        scores = {index: known[index].score if known[index].groups else unknown for index in tried}
        ages = {index: max(1.0, turn - known[index].turn) for index in tried}
        total, age = sum(scores.values()), sum(ages.values())
        rho = self.config.staleness_share if total > 0 else 1.0

        def key(index: int) -> tuple[float, float]:
            share = (1 - rho) * scores[index] / (total or 1.0) + rho * ages[index] / age
            return (math.log(1 - rng.random()) / share if share else -math.inf), rng.random()

        return sorted(tried, key=key, reverse=True)[:count]

    def _keep(self, index: int, record: TaskRecord) -> None:
        self.state[str(index)] = list(astuple(record))


def task_order(
    config: CurriculumConfig, number: int, seed: int, state: dict[str, list[float]]
) -> LearnabilityOrder | None:
    """The order of `number` tasks that `config` asks for. None: every task once an epoch."""
    return None if config.tasks == "epochs" else LearnabilityOrder(number, seed, config, state)
