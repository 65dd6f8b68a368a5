"""The contract between an algorithm and the training run that carries it out.

An algorithm is given a `Training`. It takes rollouts from `Training.rollouts`, updates weights through
`Training.learner`, publishes resources, and finishes each step. The trainer implements all of it; an algorithm never
opens a store, a model or a file. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentlightning.credit.rejection import FAILED, Check, Rejection, count_reasons
from agentlightning.errors import ConfigError
from agentlightning.policy.base import UPDATE, Metrics, UpdateOptions
from agentlightning.policy.learner import Learner
from agentlightning.resources import NamedResources
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.trajectory import Reward, TrainingSample, Trajectory

if TYPE_CHECKING:
    from agentlightning.evaluation.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A point of a training rollout that has ended: one of its calls. A rollout that branches off here runs the agent
    anew; the calls before the point are given their recorded answers, and this one is sampled, or goes on from the
    first tokens of its recorded answer, which are then a part of its prompt.

    >>> agl.BranchPoint("ro-1", call="span-3").call
    'span-3'
    """

    rollout_id: str
    call: str
    """Its `span_id`. That of the first call gives a further rollout with nothing in common but the task."""
    kept: int = 0
    """How many of its `response_token_ids` are kept; fewer than all."""


@dataclass(frozen=True, slots=True)
class Want:
    """`n` rollouts that an algorithm wants: of the run's next task, of a task that it names, or off another rollout.

    >>> agl.Want(task=3, n=8)
    Want(task=3, branch=None, n=8)
    """

    task: Any = None
    """Its place in `training.train_tasks`, or the task itself. None: the next one of the run's own order."""
    branch: BranchPoint | None = None
    """Where they branch off a rollout. They belong to its task and its group."""
    n: int = 1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"{self} is no rollout; n is 1 or more")
        if self.task is not None and self.branch is not None:
            raise ValueError(f"{self} has two tasks; a branch has that of its rollout: leave task out")

    @property
    def is_next(self) -> bool:
        """Whether it is for the run's next task."""
        return self.task is None and self.branch is None


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The rollouts that an algorithm wants next.

    >>> from agentlightning.algorithms.training import RolloutRequest
    >>> RolloutRequest([agl.Want(n=8)] * 16).temperature
    1.0
    """

    wants: Sequence[Want]
    temperature: float = 1.0
    """Sampling temperature of the policy."""
    check: Check | None = None
    """Names the rollouts that the algorithm cannot learn from. They are left out and counted, and a resumed run runs
    them again. Too many of them stop training."""
    timeout_reward: float | None = None
    """The reward of rollouts that ran out of time, which then count as successful. None: they have failed."""
    top_p: float = 1.0
    """The policy samples from the most likely tokens that together have this probability."""
    top_k: int = 0
    """The policy samples from so many of the most likely tokens; 0: from all."""

    @property
    def tasks(self) -> int:
        """The number of next tasks. Raises ConfigError where a task or a branch is named, or the wants differ: recorded
        rollouts, which this is for, cannot be chosen."""
        if any(not want.is_next or want.n != self.wants[0].n for want in self.wants):
            raise ConfigError(
                "recorded rollouts come as they are: they have no task by name, no branch and no group of its own size;"
                " ask for tasks=N, group_size=G"
            )
        return len(self.wants)

    @property
    def group_size(self) -> int:
        return max((want.n for want in self.wants), default=0)

    @property
    def sampling_parameters(self) -> dict[str, float]:
        """Those of the policy, without `top_p` and `top_k` that limit nothing."""
        top_p = {"top_p": self.top_p} if self.top_p < 1 else {}
        return {"temperature": self.temperature} | top_p | ({"top_k": self.top_k} if self.top_k else {})


@dataclass(frozen=True, slots=True)
class Collected:
    """One batch of rollouts.

    >>> from agentlightning.algorithms.training import Collected
    >>> Collected(trajectories=()).failed
    ()
    """

    trajectories: tuple[Trajectory, ...]
    """Of the usable rollouts, in the order requested. Those of one task have the same `group`, but for those of a task
    that is named: they are a group beside that of the run's next task."""
    failed: tuple[Rollout, ...] = ()
    """Rollouts that ended without success."""
    rejected: tuple[Rejection, ...] = ()
    """Rollouts that succeeded and cannot be used."""
    timeouts: int = 0
    """Rollouts whose last attempt timed out: among `failed`, or with a `timeout_reward` among `trajectories`."""
    seconds: float = 0.0
    sampled_before: int = 0
    """Of the sampled tokens, those of rollouts that had finished before the run was resumed."""
    metrics: Metrics = field(default_factory=dict[str, float])
    """What the source counts beside these, for the step's metrics."""

    @property
    def rollouts(self) -> int:
        """The number of rollouts requested."""
        return len(self.trajectories) + len(self.failed) + len(self.rejected)

    def __add__(self, more: Collected) -> Collected:
        """Two batches as one."""
        summed = {name: self.metrics.get(name, 0.0) + value for name, value in more.metrics.items()}
        return Collected(
            self.trajectories + more.trajectories,
            self.failed + more.failed,
            self.rejected + more.rejected,
            self.timeouts + more.timeouts,
            self.seconds + more.seconds,
            self.sampled_before + more.sampled_before,
            {**self.metrics, **summed},
        )

    @property
    def left_out(self) -> dict[str, int]:
        """The number of unusable rollouts by reason, failures included."""
        return ({FAILED: len(self.failed)} if self.failed else {}) | count_reasons(self.rejected)

    @property
    def sampled_tokens(self) -> int:
        calls = (call for trajectory in self.trajectories for call in trajectory.transitions)
        return sum(len(call.response_token_ids) for call in calls if call.replays is None)


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """A finished rollout as an algorithm reads it that learns from text.

    >>> from agentlightning.algorithms.training import RolloutReport
    >>> RolloutReport("ro-1", score=1.0).failure is None
    True
    """

    rollout_id: str
    score: float | None = None
    """The reward, its dimensions weighed. None: the rollout failed, or has no usable reward."""
    reward: Reward | None = None
    output: Any = None
    """What the agent returned."""
    failure: str | None = None
    """Why there is no score."""
    spans: tuple[Span, ...] = ()
    attempt: Attempt | None = None
    """The last one. None: none was made."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One algorithm of several in a run, as the run needs to know it.

    >>> from agentlightning.algorithms.training import Stage
    >>> Stage(0, of=2, name="apo", steps=30).number
    1
    """

    place: int
    """From 0, over all rounds."""
    of: int
    """The number of stages of the run."""
    name: str
    """That of its algorithm."""
    steps: int
    """The most steps that it does."""
    learns_weights: bool = True
    selects_result: bool = False
    """Whether it chooses its result on the validation tasks itself; the run then does not validate it."""
    settings: str = ""
    """Tells its settings from others; empty where it has none."""
    lr_factor: float = 1.0
    """Multiplies the learning rates of the run."""

    @property
    def number(self) -> int:
        return self.place + 1


class RolloutSource(Protocol):
    """Where an algorithm's rollouts come from: run for each step, run ahead of it, or recorded earlier."""

    async def next(self, request: RolloutRequest) -> Collected:
        """The next batch. The same request in a resumed run continues what was interrupted. Raises ValueError for a
        task or a branch that does not exist, before anything is run, and TrainingStopped where too many rollouts
        failed or were rejected."""
        ...


class Training(RolloutSource, Protocol):
    """A training run, as an algorithm sees it."""

    @property
    def step(self) -> int:
        """The number of finished steps: 0 in a new run, more in a resumed one. In a run of several stages, those of the
        present stage."""
        ...

    @property
    def target_agent(self) -> str | None:
        """The agents to train, as the agent itself declares them (`LitAgent.trained_agents`): a regular expression for
        the whole name. None: every agent."""
        ...

    @property
    def seed(self) -> int:
        """The seed of the run (`run.seed`), for what the algorithm draws at random."""
        ...

    @property
    def learner(self) -> Learner | None:
        """The weights. None for an algorithm that trains none."""
        ...

    @property
    def resources(self) -> NamedResources:
        """The resources that rollouts are given beside the policy."""
        ...

    @property
    def train_tasks(self) -> Sequence[Any]:
        """The tasks to learn from."""
        ...

    @property
    def validation_tasks(self) -> Sequence[Any]:
        """The tasks to choose a result by. Those held out are never shown to an algorithm."""
        ...

    @property
    def held_out_tasks(self) -> int:
        """The number of tasks that the gain is measured on."""
        ...

    @property
    def directory(self) -> Path:
        """The run directory."""
        ...

    def note(self, text: str) -> None:
        """Show a line to the user."""
        ...

    def warn(self, name: str, text: str) -> None:
        """Show a warning once in the life of the run, and keep it for the result."""
        ...

    async def try_resources(
        self, resources: NamedResources, tasks: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> list[RolloutReport]:
        """One rollout of each task with these resources in place of those published, in the order of `tasks`. Their
        keys name the rollouts: asked again within a step, a name has the rollout it had. Failures are results.
        `metadata` is recorded with each rollout."""
        ...

    async def publish(self, resources: NamedResources) -> None:
        """Replace resources by name (prompt templates, for example), for all rollouts requested from now on.
        Checkpoints hold them."""
        ...

    async def starting_weights(self) -> Path | None:
        """The weights that the run started from, in a directory that transformers loads; None where they are the ones
        below the learner's adapters. Raises ConfigError in a run that trained before anyone asked for them."""
        ...

    async def collect(
        self,
        wants: Sequence[Want] = (),
        *,
        tasks: int = 0,
        group_size: int = 1,
        temperature: float = 1.0,
        check: Check | None = None,
        timeout_reward: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Collected:
        """The next batch of rollouts: what is wanted, and `group_size` of each of the next `tasks` tasks, sampled as
        the other fields of a `RolloutRequest` say. Raises as `next`."""
        wants = [*wants, *[Want(n=group_size)] * tasks]
        return await self.next(RolloutRequest(wants, temperature, check, timeout_reward, top_p, top_k))

    async def recall(
        self, groups: Mapping[str, str], *, tasks: Mapping[str, Any], max_age: int, check: Check | None = None
    ) -> tuple[Trajectory, ...]:
        """Rollouts of earlier steps, read again: `groups` are by rollout id what they belong to now, `tasks` their
        inputs. Those with a token that is more than `max_age` updates old, those that the store has no longer, and
        those that `check` names are left out."""
        ...

    async def update(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        """One update, and its metrics. New model calls wait meanwhile; those in progress finish first or continue
        across the update. Raises ConfigError where there is no learner."""
        ...

    async def evaluate(self, tasks: Sequence[Any] | None = None) -> Evaluation:
        """The mean reward of the present weights and resources on tasks (default: the validation tasks), one rollout
        each, decoded greedily."""
        ...

    async def keep_best(self, score: float) -> None:
        """Keep the present weights as the result of the run if `score` is higher than of those kept so far. A run that
        has validation tasks goes by their reward instead."""
        ...

    async def finish_step(self, collected: Collected, metrics: Metrics) -> None:
        """Finish the step: write `metrics`, validate and write a checkpoint when due, go to the next step. `metrics`
        may hold any numbers; `training.health.step_record.StepRecord` lists those that the run's warnings use."""
        ...

    async def begin_stage(self, stage: Stage) -> bool:
        """Begin a stage of several, or continue it in a resumed run; the one before is finished. False: the stage was
        finished in an earlier session. Raises ResumeError where the run had another algorithm at its place."""
        ...
