"""How recorded data is learned from: the algorithm that fits it, and the data in the tokens of the model."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.preference import DPO
from agentlightning.algorithms.recorded.filters import successful
from agentlightning.algorithms.recorded.method import NAMES, DataCounts, Method, MethodSetting, choose, for_recorded
from agentlightning.algorithms.recorded.preference_records import load_preferences, of_target, to_preferences
from agentlightning.algorithms.recorded.sessions import (
    NO_LOGPROBS,
    PART,
    Session,
    Sessions,
    TokenizedSession,
    Tokenizer,
    describe_notes,
    missing_rewards,
    without_probabilities,
)
from agentlightning.algorithms.sft import SFTAlgorithm
from agentlightning.config import TrainConfig
from agentlightning.credit import is_target
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.rejection import MISSING_REWARD, Rejection
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.optimizer_config import Objective
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import task_key
from agentlightning.training.recorded.source import describe, tokenized
from agentlightning.trajectory import Trajectory
from agentlightning.util.settings import settings_from

# -- options ---------------------------------------------------------------------------------------------------------

# How recorded sessions are learned from, and the same for an algorithm's own settings.


@dataclass(frozen=True, slots=True)
class OfflineOptions:
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
CHANGED: Final = {"num_iterations": "steps", "target_agent": "target_agent"}
"""Options -> the fields of an algorithm's settings that they replace."""


def resumed_options(given: OfflineOptions, recorded: Mapping[str, Any], tasks: Any) -> OfflineOptions:
    """The options of a resumed run, with its own held-out tasks. Raises ConfigError for those that it cannot change."""
    before, default = OfflineOptions(**recorded), OfflineOptions()
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


def with_options(algorithm: Any, options: OfflineOptions) -> Any:
    """The algorithm with the options in its settings. Raises ConfigError where it has no such setting."""
    given = {field: getattr(options, name) for name, field in CHANGED.items() if getattr(options, name) is not None}
    if not given:
        return algorithm
    config: Any = getattr(algorithm, "config", None)
    known: Mapping[str, Any] = getattr(type(config), "model_fields", {})
    for name, setting in CHANGED.items():
        if setting in given and setting not in known:
            raise ConfigError(f"{name}={given[setting]!r}: {type(algorithm).__name__} has no setting {setting}")
    settings = settings_from(type(config), given, base=config, source="given to train")
    found = copy.copy(algorithm)
    if isinstance(algorithm, LightningRL):
        LightningRL.__init__(found, settings, store=algorithm.store)
    else:
        found.config = settings
    return found


Prepare = Callable[[Sequence[Session]], tuple[list[Trajectory], list[Rejection]]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is learned, and how."""

    algorithm: Algorithm[Any]
    objective: Objective
    trajectories: Sequence[Trajectory]
    method: Method | None = None
    rejected: Sequence[Rejection] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sessions that were not chosen, by reason."""
    rendered: int = 0
    foreign: int = 0
    sessions: int = 0
    """What was learned from, where it is not the trajectories. 0: these."""
    notes: tuple[str, ...] = ()
    prepare: Prepare | None = None
    """Puts sessions that arrive later into the same form."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the plan of one call of `train`."""

    config: TrainConfig
    store: LightningStoreBase
    options: OfflineOptions
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
        found, rejected = await asyncio.to_thread(tokenized, sessions.usable, tokenizer)
        weights = algorithm.reward_weights
        unscored = missing_rewards([s for s in sessions.usable if s.rollout.rollout_id not in ids(rejected)], weights)
        found = [each for each in found if each.trajectory.rollout_id not in ids(unscored)]
        rejected = [*rejected, *unscored]
        if not found and unscored and unscored[0].reason != MISSING_REWARD:
            raise DatasetError(f"no session has a reward that can be used; of the first: {unscored[0].message}")
        if isinstance(algorithm, LightningRL):
            return await asyncio.to_thread(self._reinforcement, algorithm, sessions.usable, found, rejected, tokenizer)
        prepared, several = with_options(algorithm, self.options), ()
        if isinstance(prepared, DPO):
            several = _note_several(sessions.usable)
            found, unusable = await asyncio.to_thread(_divide, sessions.usable, found, "awr", tokenizer, weights)
            found, rejected = [_by_prompt(each) for each in found], [*rejected, *unusable]
        trajectories = [without_probabilities(each.trajectory) for each in found]
        if isinstance(prepared, DPO):
            await asyncio.to_thread(prepared.check_data, trajectories, self.target)
        rendered, foreign = sum(e.rendered for e in found), sum(e.foreign for e in found)
        notes = (f"{algorithm.name}: {len(found)} sessions", *several, *describe_notes(tokenizer.counts))
        return Plan(
            prepared, prepared.objective, trajectories, None, rejected, {}, rendered, foreign, len(found), notes
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
        return Plan(with_options(algorithm, self.options), "supervised", (), left_out=left_out)

    def _pairs(self, algorithm: DPO, tokenizer: Tokenizer) -> Plan:
        records = load_preferences(algorithm.data)
        trajectories, rejected = to_preferences(
            records, tokenizer.chat, tokenizer.context_length, self.target, tokenizer.counts
        )
        if not trajectories:
            counted = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in describe(rejected).items())
            raise DatasetError(
                f"none of {len(records)} preference pairs can be learned from ({counted}). The first:"
                f" {rejected[0].rollout_id}: {rejected[0].message}"
            )
        prepared = with_options(algorithm, self.options)
        prepared.check_data(trajectories, self.target)
        pairs = len(trajectories) // 2
        notes = (f"{algorithm.name}: {pairs} preference pairs", *describe_notes(tokenizer.counts))
        return Plan(prepared, prepared.objective, trajectories, rejected=rejected, sessions=pairs, notes=notes)

    def _reinforcement(
        self,
        algorithm: LightningRL,
        sessions: Sequence[Session],
        found: Sequence[TokenizedSession],
        rejected: Sequence[Rejection],
        tokenizer: Tokenizer,
    ) -> Plan:
        options, weights = self.options, algorithm.config.reward_weights
        sampled = [each.trajectory for each in found if each.logprobs]
        refused = {each.rollout_id: each for each in algorithm.rejections(sampled, self.target)} if sampled else {}
        groups: dict[str, list[float]] = {}
        for each in found:
            groups.setdefault(each.trajectory.group, []).append(_score(each.trajectory, weights))
        pooled = [group for group in groups.values() if len(group) > 1]
        singles = [group[0] for group in groups.values() if len(group) == 1]
        pooled += [singles] if singles else []
        known = len(sampled) - len(refused)
        divided, unusable = _divide(sessions, found, "rejection", tokenizer, weights)
        wins = [each for each in divided if _score(each.trajectory, weights) >= options.success_threshold]
        counts = DataCounts.of(pooled, known, options.success_threshold)
        counts = replace(counts, successful=len(wins))
        method = self._method(counts, known)
        notes = [
            f"LightningRL learns by {NAMES[method]}: {counts.sessions} sessions of {len(groups)} tasks, {known} of them"
            f" with log-probabilities, {counts.successful} with a reward of {options.success_threshold:g} or more"
        ]
        if singles:
            notes.append(f"{len(singles)} tasks have one session each; their baseline is the mean of such sessions")
        notes += _note_several(sessions)
        if method == "rejection":
            found, rejected = wins, [*rejected, *unusable]
        elif method == "awr":
            found, unusable = _divide(sessions, found, method, tokenizer, weights)
            rejected = [*rejected, *unusable]
        usable, further = _usable(found, method, refused)
        rendered, foreign = sum(each.rendered for each in usable), sum(each.foreign for each in usable)
        if foreign:
            notes.append(f"{foreign} calls have tokens of another tokenizer; their text is rendered anew")
        notes += describe_notes(tokenizer.counts)
        trajectories = [_trajectory(each, method) for each in usable]
        rejected = [*rejected, *further]
        if method == "rejection":
            made, size = self._rejection_sampling(algorithm, trajectories), len(trajectories)
            return Plan(made, "supervised", trajectories, method, rejected, {}, rendered, foreign, size, tuple(notes))
        prepared = for_recorded(algorithm, method, options.target_agent, options.num_iterations)
        objective: Objective = "reinforcement" if method == "importance" else "supervised"
        prepare = _preparing(tokenizer, prepared, method)
        size = len(trajectories)
        return Plan(
            prepared, objective, trajectories, method, rejected, {}, rendered, foreign, size, tuple(notes), prepare
        )

    def _method(self, counts: DataCounts, known: int) -> Method:
        options = self.options
        if options.follow and options.method == "auto" and counts.sessions:
            return "importance" if known * 2 >= counts.sessions else "awr"
        return choose(options.method, counts, options.success_threshold)

    def _rejection_sampling(self, algorithm: LightningRL, wins: Sequence[Trajectory]) -> SFTAlgorithm:
        """Supervised learning on the successful sessions, as many at a time as a step of the algorithm has."""
        config = algorithm.config
        own = [of_target(each, self.target) for each in wins]
        return SFTAlgorithm(
            dataset=[each for each in own if each.transitions],
            steps=self.options.num_iterations or config.steps,
            batch_size=config.tasks_per_step,
            seed=self.config.run.seed,
            optimizer=config.optimizer,
        )


def query_of(algorithm: Algorithm[Any], store: LightningStoreBase, options: OfflineOptions) -> TrajectoryQuery | None:
    """Which sessions supervised learning imitates; None where it has conversations of its own."""
    if not isinstance(algorithm, SFTAlgorithm):
        return None
    if isinstance(algorithm.dataset, TrajectoryQuery):
        return algorithm.dataset
    return None if algorithm.has_dataset else store.get_successful_trajectories(threshold=options.success_threshold)


def ids(rejected: Sequence[Rejection]) -> set[str]:
    return {each.rollout_id for each in rejected}


def _preparing(tokenizer: Tokenizer, algorithm: LightningRL, method: Method) -> Prepare:
    def prepare(arrived: Sequence[Session]) -> tuple[list[Trajectory], list[Rejection]]:
        found, rejected = tokenized(arrived, tokenizer)
        unscored = missing_rewards(arrived, algorithm.reward_weights)
        found = [each for each in found if each.trajectory.rollout_id not in ids(unscored)]
        found, unusable = _divide(arrived, found, method, tokenizer, algorithm.reward_weights)
        unscored += unusable
        usable, further = _usable(found, method, {})
        return [_trajectory(each, method) for each in usable], [*rejected, *unscored, *further]

    return prepare


def _divide(
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
    if not several or method == "importance":
        return list(found), []
    parts = [part for each in several for part in each.parts()]
    parts = [part for part in parts if any(is_target(call.agent, tokenizer.target) for call in part.calls)]
    made, rejected = tokenized(parts, tokenizer)
    unscored = missing_rewards(parts, weights)
    made = [each for each in made if each.trajectory.rollout_id not in ids(unscored)]
    divided = {each.rollout.rollout_id for each in several}
    whole = [each for each in found if each.trajectory.rollout_id not in divided]
    return [*whole, *made], [*rejected, *unscored]


def _note_several(sessions: Sequence[Session]) -> tuple[str, ...]:
    several = sum(bool(each.rewards) for each in sessions)
    text = f"{several} sessions hold several rewards; each belongs to the calls since the one before it"
    return (text,) if several else ()


def _by_prompt(session: TokenizedSession) -> TokenizedSession:
    """Parts of sessions are compared with those that answer the same prompt, and not with all of their task."""
    whole = session.trajectory
    if PART not in whole.rollout_id:
        return session
    group = f"{whole.group} {task_key(list(whole.transitions[0].prompt_token_ids))}"
    return replace(session, trajectory=replace(whole, group=group))


def _usable(
    found: Sequence[TokenizedSession], method: Method, refused: Mapping[str, Rejection]
) -> tuple[list[TokenizedSession], list[Rejection]]:
    """The sessions that a method can learn from, and the others."""
    if method != "importance":
        return list(found), []
    usable = [each for each in found if each.logprobs and each.trajectory.rollout_id not in refused]
    message = 'of its calls no log-probabilities in tokens of this model are known; method="awr" learns from it'
    without = [Rejection(each.trajectory.rollout_id, NO_LOGPROBS, message) for each in found if not each.logprobs]
    return usable, [*without, *refused.values()]


def _trajectory(session: TokenizedSession, method: Method) -> Trajectory:
    return session.trajectory if method == "importance" else without_probabilities(session.trajectory)


def _score(trajectory: Trajectory, weights: Mapping[str, float] | None) -> float:
    found = team_score(trajectory, weights)
    assert found is not None  # Sessions without a reward were left out.
    return found
