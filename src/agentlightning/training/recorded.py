"""Recorded data as what a run learns from: sessions of a store, conversations, or preference pairs, without an agent.

`open_recorded` reads the data, chooses the algorithm that fits it (`Planner`), puts it into the tokens of the model,
and makes a source of batches: groups of one task each, over and over, or as they arrive. All else is the run of any
other algorithm: its steps, checkpoints, measurements (of an `eval_agent`, where there is one), report and resume.

Sessions of tasks that have one session each share a group, whose mean reward is then the baseline of all of them.
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from agentlightning.algorithms import make_algorithm
from agentlightning.algorithms.base import Algorithm, class_name
from agentlightning.algorithms.lightning_rl import LightningRL, LightningRLConfig
from agentlightning.algorithms.preference import DPO
from agentlightning.algorithms.recorded.filters import successful
from agentlightning.algorithms.recorded.preference_records import conversations, load_preferences, to_preferences
from agentlightning.algorithms.recorded.sessions import (
    NO_LOGPROBS,
    PART,
    Session,
    Sessions,
    TokenizedSession,
    Tokenizer,
    describe_notes,
    missing_rewards,
    read_sessions,
    without_probabilities,
)
from agentlightning.algorithms.sequential import Sequential
from agentlightning.algorithms.sft import RejectionSampling, SFTAlgorithm, SFTResult
from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.config import TrainConfig
from agentlightning.credit import is_target
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.base import SMALLEST_SPREAD, spread
from agentlightning.credit.rejection import Rejection, count_reasons, describe_reasons
from agentlightning.errors import ConfigError, DatasetError, ResumeError, TrainingStopped
from agentlightning.models.resolve import TINY
from agentlightning.policy.losses import SAMPLED_LOGPROBS, AWRLoss, CISPOLoss
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import load_dataset, task_key
from agentlightning.training.persistence.run_changes import Tasks, check_objects
from agentlightning.training.persistence.run_dir import RecordedData, RunDir, RunState
from agentlightning.training.report.result import RecordedResult
from agentlightning.training.starting_policy import make_starting_policy
from agentlightning.training.trainer_settings import with_lora
from agentlightning.trajectory import Trajectory
from agentlightning.util.plugins import load
from agentlightning.util.progress import Progress
from agentlightning.util.settings import settings_from

Method: TypeAlias = Literal["importance", "awr", "rejection"]
MethodSetting: TypeAlias = Literal["auto", "importance", "awr", "rejection"]
METHODS: Final = ("auto", "importance", "awr", "rejection")
NAMES: Final = {
    "importance": "importance-weighted policy gradient",
    "awr": "advantage-weighted regression",
    "rejection": "rejection sampling fine-tuning",
}
SINGLES: Final = "sessions of tasks with one session"
"""The group of such sessions."""
POLL_SECONDS: Final = 0.5
CHECKPOINT_EVERY: Final = 20
"""Steps between checkpoints, unless `run.checkpoint_every` says otherwise: a step costs no rollouts here."""
SOURCES: Final = ("dataset", "validation", "data")
"""Attributes of algorithms that hold what they learn from."""
SUMMED: Final = (
    "groups",
    "groups_trained",
    "groups_without_spread",
    "groups_too_small",
    "groups_without_tokens",
    "rollouts_trained",
    "tokens_trained",
    "pairs",
    "groups_without_pairs",
    "skipped_steps",
    "rollouts_not_finite",
)
"""Counts of a step that are summed over a run."""

# -- options ---------------------------------------------------------------------------------------------------------

# How recorded sessions are learned from, and the same for an algorithm's own settings.


@dataclass(frozen=True, slots=True)
class RecordedOptions:
    """How recorded sessions are learned from."""

    num_iterations: int | None = None
    """Updates. None: as many as the algorithm says."""
    target_agent: str | None = None
    """Only calls of agents whose whole name matches this regular expression are learned from. None: as the algorithm
    says."""
    method: MethodSetting = "auto"
    """How LightningRL learns from sessions of another policy: importance, awr, rejection; auto: as the data allows."""
    success_threshold: float = 0.5
    """The reward from which on a session is a success, for method "rejection"."""
    follow: bool = False
    """Learn from each session once, as they arrive, and wait for those to come."""
    follow_timeout: float | None = None
    """Seconds without a new session after which following ends. None: it waits on."""
    eval_agent: Any = None
    """The agent whose reward on the held-out tasks is measured before and after. None: nothing is measured."""
    held_out_dataset: Any = None
    """The tasks to measure on: a list, or a file."""

    def as_json(self) -> dict[str, Any]:
        """What a resumed run finds again; an agent that is an object and the tasks are not among it."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["eval_agent"] = self.eval_agent if isinstance(self.eval_agent, str) else None
        return found | {"held_out_dataset": None}


MAY_CHANGE: Final = frozenset({"num_iterations", "follow_timeout", "eval_agent"})
"""Options that a resumed run may be given anew."""


def resumed_options(given: RecordedOptions, recorded: Mapping[str, Any], tasks: Any) -> RecordedOptions:
    """The options of a resumed run, with its own held-out tasks. Raises ConfigError for those that it cannot change."""
    before, default = RecordedOptions(**recorded), RecordedOptions()
    new = {
        field.name: getattr(given, field.name)
        for field in fields(given)
        if getattr(given, field.name) != getattr(default, field.name)
    }
    fixed = [name for name, value in new.items() if name not in MAY_CHANGE and value != getattr(before, name)]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: a resumed run keeps this, as its earlier steps would not fit any more; leave it out,"
            " or start a new run"
        )
    return replace(before, **new, held_out_dataset=tasks)


def with_options(algorithm: Algorithm[Any], options: RecordedOptions) -> Algorithm[Any]:
    """The algorithm with the options in its settings. Raises ConfigError where it has no such setting."""
    values = {"num_iterations": options.num_iterations, "target_agent": options.target_agent}
    names = {"num_iterations": "steps", "target_agent": "target_agent"}
    given = {names[name]: value for name, value in values.items() if value is not None}
    config: Any = getattr(algorithm, "config", None)
    known: Mapping[str, Any] = getattr(type(config), "model_fields", {})
    for name, setting in names.items():
        if setting in given and setting not in known:
            raise ConfigError(f"{name}={given[setting]!r}: {type(algorithm).__name__} has no setting {setting}")
    return with_settings(algorithm, given, "given to train") if given else algorithm


def with_settings(algorithm: Algorithm[Any], given: Mapping[str, Any], source: str) -> Any:
    """A copy of the algorithm with other settings, which shares nothing that it learns with the original."""
    found: Any = copy.copy(algorithm)
    settings = settings_from(type(algorithm.config), given, base=algorithm.config, source=source)
    if isinstance(algorithm, LightningRL):
        LightningRL.__init__(found, settings, store=algorithm.store)
    else:
        found.config = settings
    return found


# -- method ------------------------------------------------------------------------------------------------------------

# How LightningRL learns from sessions that were recorded earlier.
#
#     importance   the policy gradient, each token weighed by a clipped importance ratio without gradient (CISPO,
#                  arXiv:2506.13585, equations 4 and 5): needs the log-probability each token was sampled with
#     awr          advantage-weighted regression (arXiv:1910.00177, equation 3): needs rewards that differ
#     rejection    rejection sampling fine-tuning (arXiv:2308.01825): imitates the successful sessions, and needs some
#
# The clip of PPO is for data of the present policy: beyond its bounds a token has no gradient, so that sessions of
# another policy would soon teach nothing.


@dataclass(frozen=True, slots=True)
class DataCounts:
    """What sessions have to learn from."""

    sessions: int
    """Those with a reward, in tokens of the model."""
    logprobs: int
    """Those whose calls have the log-probabilities they were sampled with."""
    groups: int
    groups_with_spread: int
    """Tasks whose sessions differ in reward."""
    successful: int
    """Sessions, or parts of them, with at least the reward that counts as success."""


def choose(setting: MethodSetting, counts: DataCounts, threshold: float) -> Method:
    """The method that the data has what it needs for. Raises DatasetError, saying what is missing."""
    if setting not in METHODS:
        raise ConfigError(f"method={setting!r} is none; choose one of {', '.join(METHODS)}")
    if setting == "importance" and not counts.logprobs:
        raise DatasetError(
            f'method="importance" needs log-probabilities of the sampler, and none of {counts.sessions} sessions has'
            ' them in tokens of this model: record through the gateway with this model, or use method="awr"'
        )
    if setting in ("importance", "awr") and not counts.groups_with_spread:
        raise DatasetError(
            f'method="{setting}" learns from differences in reward, and the sessions of each of {counts.groups} tasks'
            ' have the same one; record more of the same task, or use method="rejection"'
        )
    if setting != "auto" and (setting != "rejection" or counts.successful):
        return setting
    if setting == "auto" and counts.groups_with_spread:
        return "importance" if counts.logprobs * 2 >= counts.sessions else "awr"
    if counts.successful:
        return "rejection"
    raise DatasetError(
        f"the sessions of each of {counts.groups} tasks have the same reward, and none of {counts.sessions} has"
        f" {threshold:g} or more: there is nothing to prefer. Record sessions that differ, or lower success_threshold"
    )


def for_recorded(algorithm: LightningRL, method: Method, success_threshold: float) -> Algorithm[Any]:
    """What learns by a method: the algorithm, with the loss of the method unless one that fits was set, or rejection
    sampling of as many sessions at a time as a step of the algorithm has tasks."""
    config = algorithm.config
    if method == "rejection":
        names = ("steps", "tasks_per_step", "target_agent", "reward_weights", "optimizer")
        shared: dict[str, Any] = {name: getattr(config, name) for name in names}
        return RejectionSampling(group_size=1, success_threshold=success_threshold, **shared)
    needs_sampler = any(SAMPLED_LOGPROBS in loss.needs for loss in config.losses)
    changes: dict[str, Any] = {} if method == "importance" else {"mismatch": None}
    if needs_sampler != (method == "importance") or "loss" not in config.model_fields_set:
        changes["loss"] = CISPOLoss() if method == "importance" else AWRLoss()
    found = with_settings(algorithm, changes, f'for method="{method}"')
    found.objective = "reinforcement" if method == "importance" else "supervised"
    return found


Prepare = Callable[[Sequence[Session]], tuple[list[Trajectory], list[Rejection]]]
"""Sessions as trajectories that the algorithm can use, and those that it cannot."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is learned, and how."""

    algorithm: Algorithm[Any]
    trajectories: Sequence[Trajectory]
    method: Method | None = None
    rejected: Sequence[Rejection] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sessions that were not chosen, by reason."""
    rendered: int = 0
    foreign: int = 0
    sessions: int = 0
    """What is learned from. 0: the algorithm counts it."""
    notes: tuple[str, ...] = ()
    prepare: Prepare | None = None
    """Puts sessions that arrive later into the same form."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the plan of one call of `train`."""

    config: TrainConfig
    store: LightningStoreBase | None
    options: RecordedOptions
    target: str | None
    model: str
    """As `PolicyConfig.model`."""

    async def plan(self, algorithm: Algorithm[Any], sessions: Sessions) -> Plan:
        """Raises DatasetError where nothing can be learned from, saying what is missing."""
        tokenizer = await self._tokenizer()
        if isinstance(algorithm, SFTAlgorithm):
            return await asyncio.to_thread(self._supervised, algorithm, sessions)
        if isinstance(algorithm, DPO) and algorithm.has_dataset:
            return await asyncio.to_thread(self._pairs, algorithm, tokenizer)
        return await asyncio.to_thread(self._of_sessions, algorithm, sessions.usable, tokenizer)

    def _of_sessions(self, algorithm: Algorithm[Any], sessions: Sequence[Session], tokenizer: Tokenizer) -> Plan:
        weights, threshold = algorithm.reward_weights, self.options.success_threshold
        found, rejected = scored(sessions, tokenizer, weights)
        if not found:
            raise DatasetError(
                f"no session has a reward and tokens to learn from; the last one: {rejected[-1].message}"
            )
        method: Method | None = None
        refused: dict[str, Rejection] = {}
        notes: list[str] = []
        if isinstance(algorithm, LightningRL):
            sampled = [each.trajectory for each in found if each.logprobs]
            refused = {each.rollout_id: each for each in algorithm.rejections(sampled, self.target)} if sampled else {}
            parts = divided(sessions, found, "rejection", tokenizer, weights)[0]
            wins = sum(_score(each.trajectory, weights) >= threshold for each in parts)
            method = self._method(found, len(sampled) - len(refused), wins, weights, notes)
            algorithm = for_recorded(algorithm, method, threshold)
        own: Method | None = "rejection" if isinstance(algorithm, RejectionSampling) else method
        way = "awr" if isinstance(algorithm, DPO) else own
        notes += _note_several(sessions) if way is not None else ()
        found, further = fitted(sessions, found, tokenizer, way, weights, refused)
        if isinstance(algorithm, RejectionSampling):
            scores = len(found)
            found = [each for each in found if algorithm.is_success(each.trajectory)]
            if not found:
                bound = algorithm.config.success_threshold
                raise DatasetError(
                    f"none of {scores} sessions has a reward of {bound:g} or more; lower success_threshold"
                )
        trajectories = [each.trajectory for each in found]
        if isinstance(algorithm, DPO):
            trajectories = [_by_prompt(each) for each in trajectories]
            algorithm.check_data(trajectories, self.target)
        rendered, foreign = sum(each.rendered for each in found), sum(each.foreign for each in found)
        if foreign:
            notes.append(f"{foreign} calls have tokens of another tokenizer; their text is rendered anew")
        if method is None:
            notes.insert(0, f"{algorithm.name}: {len(found)} sessions")
        notes += describe_notes(tokenizer.counts)
        prepare = partial(prepared, tokenizer=tokenizer, method=way, weights=weights)
        rejected += further
        return Plan(
            algorithm,
            trajectories,
            method,
            rejected,
            rendered=rendered,
            foreign=foreign,
            sessions=len(found),
            notes=tuple(notes),
            prepare=prepare,
        )

    async def _tokenizer(self) -> Tokenizer:
        from agentlightning.chat.hf import load_chat_format
        from agentlightning.models.limits import model_limits
        from agentlightning.models.resolve import resolve_model

        policy = self.config.policy
        directory = await asyncio.to_thread(resolve_model, self.model)
        chat = await load_chat_format(directory, policy.tool_calls)
        vocabulary, context = await asyncio.to_thread(model_limits, directory)
        return Tokenizer(chat, min(context, policy.max_context or context), vocabulary, self.target)

    def _supervised(self, algorithm: SFTAlgorithm, sessions: Sessions) -> Plan:
        query = query_of(algorithm, self.store, self.options)
        left_out: dict[str, int] = {}
        if query is not None:
            found, left_out = successful(sessions.usable, query)
            algorithm = algorithm.on(dataset=found)
        return Plan(algorithm.on(), (), left_out=left_out)

    def _pairs(self, algorithm: DPO, tokenizer: Tokenizer) -> Plan:
        records = load_preferences(algorithm.data)
        trajectories, rejected = to_preferences(
            records, tokenizer.chat, tokenizer.context_length, self.target, tokenizer.counts
        )
        if not trajectories:
            counted = describe_reasons(count_reasons(rejected))
            raise DatasetError(
                f"none of {len(records)} preference pairs can be learned from ({counted}). The first:"
                f" {rejected[0].rollout_id}: {rejected[0].message}"
            )
        algorithm.check_data(trajectories, self.target)
        pairs = len(trajectories) // 2
        notes = (f"{algorithm.name}: {pairs} preference pairs", *describe_notes(tokenizer.counts))
        return Plan(algorithm, trajectories, rejected=rejected, sessions=pairs, notes=notes)

    def _method(
        self, found: Sequence[TokenizedSession], known: int, wins: int, weights: Any, notes: list[str]
    ) -> Method:
        """How LightningRL learns, which `notes` get with the counts that it follows from."""
        options = self.options
        groups: dict[str, list[float]] = {}
        for each in found:
            groups.setdefault(each.trajectory.group, []).append(_score(each.trajectory, weights))
        singles = [group[0] for group in groups.values() if len(group) == 1]
        pooled = [*(group for group in groups.values() if len(group) > 1), *([singles] if singles else [])]
        varied = sum(spread(group) > SMALLEST_SPREAD for group in pooled)
        counts = DataCounts(len(found), known, len(pooled), varied, wins)
        if options.follow and options.method == "auto" and found:
            method: Method = "importance" if known * 2 >= len(found) else "awr"
        else:
            method = choose(options.method, counts, options.success_threshold)
        notes.append(
            f"LightningRL learns by {NAMES[method]}: {len(found)} sessions of {len(groups)} tasks, {known} of them"
            f" with log-probabilities, {wins} with a reward of {options.success_threshold:g} or more"
        )
        if singles:
            notes.append(f"{len(singles)} tasks have one session each; their baseline is the mean of such sessions")
        return method


def query_of(
    algorithm: Algorithm[Any], store: LightningStoreBase | None, options: RecordedOptions
) -> TrajectoryQuery | None:
    """Which sessions supervised learning imitates; None where it has conversations of its own."""
    if not isinstance(algorithm, SFTAlgorithm):
        return None
    if isinstance(algorithm.dataset, TrajectoryQuery):
        return algorithm.dataset
    if algorithm.has_dataset or store is None:
        return None
    return store.get_successful_trajectories(threshold=options.success_threshold)


def ids(rejected: Sequence[Rejection]) -> set[str]:
    return {each.rollout_id for each in rejected}


def scored(
    sessions: Sequence[Session], tokenizer: Tokenizer, weights: Mapping[str, float] | None
) -> tuple[list[TokenizedSession], list[Rejection]]:
    """The sessions that have a reward, in the model's tokens, and the others."""
    found: list[TokenizedSession] = []
    rejected: list[Rejection] = []
    for session in sessions:
        made = tokenizer(session)
        (rejected if isinstance(made, Rejection) else found).append(made)  # pyright: ignore[reportArgumentType]
    refused = ids(rejected)
    unscored = missing_rewards([each for each in sessions if each.rollout.rollout_id not in refused], weights)
    refused = ids(unscored)
    return [each for each in found if each.trajectory.rollout_id not in refused], [*rejected, *unscored]


def fitted(
    sessions: Sequence[Session],
    found: Sequence[TokenizedSession],
    tokenizer: Tokenizer,
    method: Method | None,
    weights: Mapping[str, float] | None,
    refused: Mapping[str, Rejection],
) -> tuple[list[TokenizedSession], list[Rejection]]:
    """What was found, in the form that a method learns from, and what it cannot use: it has `refused` some."""
    if method == "importance":
        usable = [each for each in found if each.logprobs and each.trajectory.rollout_id not in refused]
        message = 'of its calls no log-probabilities in tokens of this model are known; method="awr" learns from it'
        without = [Rejection(each.trajectory.rollout_id, NO_LOGPROBS, message) for each in found if not each.logprobs]
        return usable, [*without, *refused.values()]
    parts, rejected = divided(sessions, found, method, tokenizer, weights) if method is not None else (found, [])
    return [replace(each, trajectory=without_probabilities(each.trajectory)) for each in parts], rejected


def prepared(
    arrived: Sequence[Session], *, tokenizer: Tokenizer, method: Method | None, weights: Mapping[str, float] | None
) -> tuple[list[Trajectory], list[Rejection]]:
    """Sessions that arrive later as the trajectories that a method learns from, and those that it cannot use."""
    found, rejected = scored(arrived, tokenizer, weights)
    found, further = fitted(arrived, found, tokenizer, method, weights, {})
    return [each.trajectory for each in found], [*rejected, *further]


def divided(
    sessions: Sequence[Session],
    found: Sequence[TokenizedSession],
    method: Method,
    tokenizer: Tokenizer,
    weights: Mapping[str, float] | None,
) -> tuple[list[TokenizedSession], list[Rejection]]:
    """What was found, with the parts of sessions that hold several rewards in their place, and parts that cannot be
    used. A conversation is one episode, whose credit rule says what each reward is due to, unless it is imitated."""
    known = {each.trajectory.rollout_id for each in found}
    several = [
        each
        for each in sessions
        if each.rewards and each.rollout.rollout_id in known and (method == "rejection" or each.has_independent_parts)
    ]
    parts = [part for each in several for part in each.parts()]
    parts = [part for part in parts if any(is_target(call.agent, tokenizer.target) for call in part.calls)]
    made, rejected = scored(parts, tokenizer, weights)
    cut = {each.rollout.rollout_id for each in several}
    return [*(each for each in found if each.trajectory.rollout_id not in cut), *made], rejected


def _note_several(sessions: Sequence[Session]) -> tuple[str, ...]:
    several = sum(bool(each.rewards) for each in sessions)
    text = f"{several} sessions hold several rewards; each belongs to the calls since the one before it"
    return (text,) if several else ()


def _by_prompt(whole: Trajectory) -> Trajectory:
    """Parts of sessions are compared with those that answer the same prompt, and not with all of their task."""
    if PART not in whole.rollout_id:
        return whole
    return replace(whole, group=f"{whole.group} {task_key(list(whole.transitions[0].prompt_token_ids))}")


def _score(trajectory: Trajectory, weights: Mapping[str, float] | None) -> float:
    found = team_score(trajectory, weights)
    assert found is not None  # Sessions without a reward were left out.
    return found


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SessionSource:
    """Batches of recorded trajectories, over and over."""

    trajectories: Sequence[Trajectory]
    seed: int = 0
    pools_singles: bool = True
    """Whether sessions of tasks with one session share groups; else each is a group of its own."""
    resumed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The position that an earlier process has reached."""
    _waiting: list[tuple[Trajectory, ...]] = field(default_factory=list[tuple[Trajectory, ...]])
    _epoch: int = 0

    @property
    def position(self) -> dict[str, Any]:
        """The number of epochs begun, and of groups of the last one that are left."""
        return {"epoch": self._epoch, "left": len(self._waiting)}

    async def next(self, request: RolloutRequest) -> Collected:
        """The next `tasks` groups of at most `group_size` sessions. Each epoch has every session once."""
        if self.resumed:
            self._go_on(request.group_size)
        chosen: list[tuple[Trajectory, ...]] = []
        while len(chosen) < request.tasks:
            if not self._waiting:
                if chosen and self._epoch:  # A small data set: no group is in a batch twice.
                    break
                self._waiting = self._shuffled(request.group_size)
                self._epoch += 1
            take = request.tasks - len(chosen)
            chosen += self._waiting[:take]
            del self._waiting[:take]
        return await _checked([each for group in chosen for each in group], request)

    def _go_on(self, group_size: int) -> None:
        epoch, left = int(self.resumed["epoch"]), int(self.resumed["left"])
        if epoch:
            self._epoch = epoch - 1
            groups = self._shuffled(group_size)
            self._epoch, self._waiting = epoch, groups[len(groups) - left :]
        self.resumed = {}

    def _shuffled(self, group_size: int) -> list[tuple[Trajectory, ...]]:
        rng = random.Random(f"{self.seed}/{self._epoch}")
        groups = chunks(self.trajectories, group_size, rng, pools_singles=self.pools_singles)
        rng.shuffle(groups)
        if not groups:
            raise DatasetError("no session is left to learn from")
        return groups


class NothingArrived(TrainingStopped):
    """No session came for as long as a run that follows its store waits: its training ends."""


@dataclass(slots=True)
class ArrivingSource:
    """Batches of sessions that have not been learned from, waiting for those that are still to come."""

    store: LightningStoreBase
    prepare: Prepare
    first: Sequence[Trajectory]
    known: set[str]
    """Rollouts that were read."""
    on_rejected: Callable[[Iterable[Rejection]], None]
    timeout: float | None = None
    """Seconds without a new session after which training ends. None: it waits on."""
    seed: int = 0
    learned: list[str] = field(default_factory=list[str])
    """Rollouts that were given to the algorithm."""
    _waiting: list[Trajectory] = field(default_factory=list[Trajectory])

    @property
    def position(self) -> dict[str, Any]:
        return {"learned": list(self.learned)}

    def __post_init__(self) -> None:
        self._waiting = list(self.first)

    async def next(self, request: RolloutRequest) -> Collected:
        """As many sessions as the request asks for, whatever their tasks. Raises NothingArrived after `timeout`."""
        wanted = request.tasks * request.group_size
        started = arrived = time.monotonic()
        while len(self._waiting) < wanted:
            if await self._read():
                arrived = time.monotonic()
            elif self.timeout is not None and time.monotonic() - arrived >= self.timeout:
                raise NothingArrived(
                    f"no session arrived for {self.timeout:g} s; {len(self._waiting)} of {wanted} for the next step"
                )
            else:
                await asyncio.sleep(POLL_SECONDS)
        batch, self._waiting = self._waiting[:wanted], self._waiting[wanted:]
        self.learned += [each.rollout_id.partition(PART)[0] for each in batch]
        groups = chunks(batch, request.group_size, random.Random(self.seed))
        collected = await _checked([each for group in groups for each in group], request)
        return replace(collected, seconds=time.monotonic() - started)

    async def _read(self) -> bool:
        found = await read_sessions(self.store, known=self.known)
        self.known |= {session.rollout.rollout_id for session in found.usable}
        self.known |= {each.rollout_id for each in found.rejected}
        usable, rejected = await asyncio.to_thread(self.prepare, found.usable)
        self.on_rejected([*found.rejected, *rejected])
        self._waiting += usable
        return bool(usable)


async def _checked(batch: Sequence[Trajectory], request: RolloutRequest) -> Collected:
    check = request.check
    rejected = [] if check is None else await asyncio.to_thread(lambda: list(check(batch)))
    refused = {each.rollout_id for each in rejected}
    usable = tuple(each for each in batch if each.rollout_id not in refused)
    return Collected(usable, rejected=tuple(rejected))


def chunks(
    trajectories: Sequence[Trajectory], group_size: int, rng: random.Random, *, pools_singles: bool = True
) -> list[tuple[Trajectory, ...]]:
    """The sessions of each task in groups of at most `group_size`, as equal in size as can be."""
    by_task: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        by_task.setdefault(each.group, []).append(each)
    singles = [group[0] for group in by_task.values() if len(group) == 1] if pools_singles else []
    tasks = [group for group in by_task.values() if len(group) > 1 or not pools_singles]
    if singles:
        tasks.append(singles)
    found: list[tuple[Trajectory, ...]] = []
    for group in tasks:
        own = list(group)
        rng.shuffle(own)
        count = -(-len(own) // group_size)
        name = SINGLES if group is singles else own[0].group
        for number in range(count):
            part = own[number::count]
            found.append(tuple(replace(each, group=f"{name}#{number}" if count > 1 else name) for each in part))
    return found


# -- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded data of a run: the source of its batches, and its account of what was left out."""

    plan: Plan
    batches: SessionSource | ArrivingSource
    data: RecordedData
    progress: Progress

    async def next(self, request: RolloutRequest) -> Collected:
        """See `RolloutSource.next`. Sampling parameters and timeouts do not apply to what was recorded."""
        collected = await self.batches.next(request)
        self.reject(collected.rejected)
        self.data.source = self.batches.position
        return collected

    def say(self, text: str) -> None:
        """Show something once, and keep it for the result."""
        if text not in self.data.notes:
            self.data.notes.append(text)
            self.progress.note(text)

    def reject(self, rejected: Iterable[Rejection]) -> None:
        """Count sessions that are left out, and name the first of each kind."""
        for each in rejected:
            if each.reason not in self.data.rejected.values():
                self.say(f"session {each.rollout_id} is left out ({each.reason.replace('_', ' ')}): {each.message}")
            self.data.rejected.setdefault(each.rollout_id, each.reason)

    def finish(self, outcome: object) -> None:
        """Take what supervised learning, which reads its conversations itself, has learned from."""
        if isinstance(outcome, SFTResult):
            self.data.sessions = outcome.conversations
            self.data.left_out.update(outcome.left_out)

    def result(self, lines: Sequence[Mapping[str, Any]]) -> RecordedResult:
        """`lines`: the metrics of all steps."""
        counts = Counter[str]()
        for line in lines:
            counts.update({name: int(line[name]) for name in SUMMED if line.get(name) is not None})
        return RecordedResult(
            algorithm=self.plan.algorithm.name,
            method=self.plan.method,
            sessions=self.data.sessions,
            left_out=dict(Counter(self.data.rejected.values()).most_common()) | self.data.left_out,
            rendered_calls=self.plan.rendered,
            foreign_calls=self.plan.foreign,
            metrics={name: value for name, value in (lines[-1] if lines else {}).items() if value is not None},
            counts=dict(counts),
            notes=tuple(self.data.notes),
        )


async def open_recorded(
    config: TrainConfig,
    given: Algorithm[Any] | None,
    store: LightningStoreBase | None,
    options: RecordedOptions,
    run_dir: RunDir,
    state: RunState,
    reward: Any,
    progress: Progress,
    stack: AsyncExitStack,
) -> tuple[TrainConfig, Recorded]:
    """The recorded data of a run, new or resumed, and the settings that it runs with.

    Raises ConfigError for arguments that do not go together, DatasetError where there is nothing that the algorithm can
    learn from, saying what is missing, and ResumeError where a part of a resumed run was an object in memory and is not
    given again."""
    data, path = state.recorded, run_dir.path
    made = given if data is not None else given or from_settings(config, ())
    store = store if store is not None else getattr(made, "store", None)
    if store is None and config.data.sessions is not None:
        store = open_sessions(config.data.sessions)
        stack.push_async_callback(store.close)
    if data is not None:
        check_objects(path, state, store, reward)
        if "eval_agent" in state.objects and options.eval_agent is None:
            raise ResumeError(
                f"{path} was started with eval_agent given as an object in memory; give it again:"
                " train(eval_agent=...), or --eval-agent"
            )
    if store is None and (data.store is not None if data is not None else made is not None and reads_store(made)):
        store = LightningStore() if data is None else open_sessions(str(data.store))
        stack.push_async_callback(store.close)
    if data is not None:
        made = restored_algorithm(given, state, data, config, store, path)
    assert made is not None
    check(made, options, config)
    made = with_options(made, options)
    target = getattr(getattr(made, "config", None), "target_agent", None)
    query = query_of(made, store, options)
    source = (store if query is None else query.store) if reads_store(made) else None
    progress.phase("reading the data" if source is None else "reading sessions")
    sessions = await _sessions(source, data, options, target, progress)
    records = [] if config.policy.model != TINY else _own_conversations(made) or _texts(sessions.usable)
    if config.policy.model == TINY and not records:
        raise ConfigError("no model: give model=NAME to the trainer, such as smollm2-135m or a directory")
    await make_starting_policy(config, run_dir, Tasks(records), progress)
    model = str(run_dir.start) if run_dir.start.exists() else config.policy.model
    if data is not None and data.method is not None and isinstance(made, LightningRL):
        options = replace(options, method=data.method)  # pyright: ignore[reportArgumentType]
    plan = await Planner(config, store, options, target, model).plan(made, sessions)
    if data is None:
        data = state.recorded = _described(made, options, source, state)
        if source is not None and not options.follow:
            data.rollouts = [each.rollout.rollout_id for each in sessions.usable] + list(ids(sessions.rejected))
        data.method, data.left_out = plan.method, dict(plan.left_out)
        if sessions.measured:
            data.left_out["modes_val_and_test"] = sessions.measured
        state.objects += [] if isinstance(options.eval_agent, str | None) else ["eval_agent"]
        state.objects += [] if isinstance(reward, str | None) else ["reward"]
    batches: Any = SessionSource(
        plan.trajectories,
        config.run.seed,
        pools_singles=not isinstance(plan.algorithm, DPO | RejectionSampling),
        resumed=data.source,
    )
    data.sessions = plan.sessions or data.sessions
    recorded = Recorded(plan, batches, data, progress)
    recorded.reject([*sessions.rejected, *plan.rejected])
    for note in plan.notes:
        recorded.say(note)
    if options.follow:
        recorded = replace(recorded, batches=_arriving(recorded, store, options, config.run.seed))
    return _settings(with_lora(config, getattr(made, "config", None)), options), recorded


def check(algorithm: Algorithm[Any], options: RecordedOptions, config: TrainConfig) -> None:
    """Raises ConfigError for what cannot learn from recorded data, and for options that do not go together."""
    if not algorithm.learns_weights:
        raise ConfigError(
            f"{type(algorithm).__name__} trains no weights, so recorded sessions teach it nothing; give an agent"
            " and tasks: train(agent=..., train_dataset=...)"
        )
    if isinstance(algorithm, Sequential):
        raise ConfigError(
            "Sequential runs an agent in each of its stages; give train(agent=..., train_dataset=...), or one"
            " algorithm to learn from recorded sessions"
        )
    for_rollouts: dict[str, Any] = {
        "guard": config.guard,
        "group_reward": config.group_reward,
        "run.gateways": config.run.gateways,
        "data.train": config.data.sessions and config.data.train,
        "data.validation": config.data.sessions and config.data.validation,
    }
    if options.eval_agent is None:
        for_rollouts["gate"] = config.gate
    if unused := [name for name, setting in for_rollouts.items() if setting]:
        raise ConfigError(f"{', '.join(unused)}: for rollouts of an agent, and this run has none; leave it out")
    if options.num_iterations is not None and options.num_iterations < 1:
        raise ConfigError(f"num_iterations={options.num_iterations} trains nothing; use at least 1")
    if (options.eval_agent is None) != (options.held_out_dataset is None):
        raise ConfigError("eval_agent and held_out_dataset go together: give both, or neither")
    if options.method != "auto" and not isinstance(algorithm, LightningRL):
        raise ConfigError(f"method={options.method!r} is a setting of LightningRL, not of {algorithm.name!r}")
    if options.follow_timeout is not None and not options.follow:
        raise ConfigError(f"follow_timeout={options.follow_timeout:g} has a meaning with follow=True only")
    if options.follow and not isinstance(algorithm, LightningRL):
        raise ConfigError(f"follow=True is for LightningRL; {algorithm.name!r} learns from what is there")
    if options.follow and options.method == "rejection":
        raise ConfigError('follow=True learns by "importance" or "awr"; method="rejection" learns from what is there')


def _settings(config: TrainConfig, options: RecordedOptions) -> TrainConfig:
    """Those of the run: no measurement without an agent, rare checkpoints."""
    run = config.run.model_copy(update={"checkpoint_every": config.run.checkpoint_every or CHECKPOINT_EVERY})
    modes = config.evaluation.modes if options.eval_agent is not None else ()
    evaluation = config.evaluation.model_copy(update={"modes": modes})
    return config.model_copy(update={"run": run, "evaluation": evaluation})


def reads_store(algorithm: Algorithm[Any]) -> bool:
    """Whether it learns from sessions of a store, and not from data of its own."""
    if isinstance(algorithm, SFTAlgorithm):
        return isinstance(algorithm.dataset, TrajectoryQuery) or not algorithm.has_dataset
    return not (isinstance(algorithm, DPO) and algorithm.has_dataset)


async def _sessions(
    store: LightningStoreBase | None,
    data: RecordedData | None,
    options: RecordedOptions,
    target: str | None,
    progress: Progress,
) -> Sessions:
    """What the store holds, or held when the run began; with `follow`, once it holds something."""
    if store is None:
        return Sessions(())
    wanted = None if data is None else data.rollouts
    found = await read_sessions(store, ids=wanted)
    if wanted is not None and (lost := len(wanted) - len(found.usable) - len(found.rejected)):
        progress.note(f"warning: {lost} sessions of this run are no longer in the store")
    since, timeout = time.monotonic(), options.follow_timeout
    while options.follow and not found.usable and (timeout is None or time.monotonic() - since < timeout):
        await asyncio.sleep(POLL_SECONDS)
        found = await read_sessions(store)
    found.check()
    found.check_target(target)
    return found


def _own_conversations(algorithm: Algorithm[Any]) -> list[Any]:
    """Those that the algorithm was given as a file or as a list of them."""
    if isinstance(algorithm, DPO) and algorithm.has_dataset:
        return conversations(load_preferences(algorithm.data))
    found = algorithm.dataset if isinstance(algorithm, SFTAlgorithm) else ()
    if isinstance(found, str | Path):
        return load_dataset(found)
    return [] if isinstance(found, TrajectoryQuery) else [each for each in found or () if isinstance(each, Mapping)]


def _texts(sessions: Sequence[Session]) -> list[Any]:
    """What the model calls of sessions say, or the tasks of sessions without any."""
    return [
        {"messages": [*call.messages, call.answer], "tools": list(call.tools)}
        for session in sessions
        for call in session.calls
        if call.messages and call.answer is not None
    ] or [session.rollout.input for session in sessions]


def _arriving(
    recorded: Recorded, store: LightningStoreBase | None, options: RecordedOptions, seed: int
) -> ArrivingSource:
    plan, data = recorded.plan, recorded.data
    assert plan.prepare is not None
    assert store is not None
    learned = [str(each) for each in data.source.get("learned", ())]
    known = {each.rollout_id for each in plan.trajectories} | set(data.rejected) | set(learned)
    first = [each for each in plan.trajectories if each.rollout_id not in set(learned)]
    return ArrivingSource(store, plan.prepare, first, known, recorded.reject, options.follow_timeout, seed, learned)


# -- what a resumed run is made of -----------------------------------------------------------------------------------


def open_sessions(name: str) -> LightningStoreBase:
    """A store of sessions: a SQLite file, an address of PostgreSQL, or the URL of a server. Raises DatasetError for a
    file that is not there: opening would make an empty store."""
    if "://" not in name and not Path(name).exists():
        raise DatasetError(f"there is no store at {name}; record sessions first, or name another one")
    return LightningStore(name)


def _described(
    algorithm: Algorithm[Any], options: RecordedOptions, store: LightningStoreBase | None, state: RunState
) -> RecordedData:
    """What a file can hold of the data and the algorithm; `state` gets the names of what none can."""
    config = getattr(algorithm, "config", None)
    sources: dict[str, Any] = {}
    for name in SOURCES:
        source = getattr(algorithm, name, None)
        if isinstance(source, TrajectoryQuery):
            kept = {key: getattr(source, key) for key in TrajectoryQuery.__slots__ if key != "store"}
            sources[name] = {**kept, "reward_weights": dict(source.reward_weights) if source.reward_weights else None}
        elif source not in (None, (), getattr(config, name, None)):
            state.objects.append(name)
    path = getattr(store, "path", None)
    if store is not None and not isinstance(path, Path):
        state.objects.append("store")
    return RecordedData(
        algorithm=class_name(algorithm),
        settings={},
        given=sorted(getattr(config, "model_fields_set", ())),
        sources=sources,
        options=options.as_json(),
        store=str(path.resolve()) if isinstance(path, Path) else None,
        first_step=state.step,
    )


def restored_algorithm(
    given: Algorithm[Any] | None,
    state: RunState,
    data: RecordedData,
    config: TrainConfig,
    store: LightningStoreBase | None,
    run_dir: Path,
) -> Algorithm[Any]:
    """The algorithm of a resumed run. Raises ResumeError where it has to be given again, or is another one."""
    way_out = f"give it again: Trainer.resume({str(run_dir)!r}, algorithm=...)"
    if given is not None:
        if class_name(given) != data.algorithm:
            raise ResumeError(f"{run_dir} is trained by {data.algorithm}, not by {class_name(given)}; {way_out}")
        return given
    if lost := [name for name in state.objects if name in (*SOURCES, "algorithm")]:
        raise ResumeError(f"{run_dir} was started with {', '.join(lost)} given as objects in memory; {way_out}")
    sources = {name: _source(each, store) for name, each in data.sources.items()}
    if data.settings:  # The run was begun when config.toml could not hold them.
        cls = load(data.algorithm)
        return cls(config=settings_from(cls.config_class, data.settings), **sources)
    own: Any = config.algorithm
    made = SFTAlgorithm(config=own, **sources) if sources else from_settings(config, data.given)
    if class_name(made) != data.algorithm:
        raise ResumeError(f"{run_dir} is trained by {data.algorithm}, which its settings do not bring back; {way_out}")
    return made


def from_settings(config: TrainConfig, given: Collection[str]) -> Algorithm[Any]:
    """The algorithm of the settings. A file of them may have every one: those of LightningRL that nobody has `given` or
    changed are left out again, as its loss then follows from the data."""
    settings = config.algorithm
    if not isinstance(settings, LightningRLConfig):
        return make_algorithm(settings)
    default = LightningRLConfig()
    values = {name: getattr(settings, name) for name in type(settings).model_fields if name != "type"}
    return LightningRL(
        **{name: each for name, each in values.items() if name in given or each != getattr(default, name)}
    )


def _source(recorded: Any, store: LightningStoreBase | None) -> Any:
    if not isinstance(recorded, Mapping):
        return recorded
    fields: dict[str, Any] = {**recorded}
    if fields.get("pass_rate") is not None:
        fields["pass_rate"] = tuple(fields["pass_rate"])
    assert store is not None
    return TrajectoryQuery(store, **fields)


def check_live(algorithm: Algorithm[Any], config: TrainConfig) -> None:
    """Raises ConfigError for data that a run with an agent would not learn from."""
    if config.data.sessions is not None:
        raise ConfigError("data.sessions: fit() runs an agent, and train() learns from recorded sessions; call that")
    stages: Any = getattr(algorithm, "stages", (algorithm,))
    if any(isinstance(each, DPO) and each.has_dataset for each in stages):
        raise ConfigError(
            "DPO was given data, and with an agent it learns from preferences between its rollouts; leave data out, or"
            " leave the agent out: Trainer(...).train(eval_agent=agent, held_out_dataset=tasks) measures it"
        )
