"""What a step does with its rollouts before the policy learns from them: what it asks the policy for, how it shapes
rewards and groups, which earlier rollouts it replays, and the training samples that it makes of them.

Of the policy it asks the columns that losses need and samples lack (log-probabilities under a reference, a teacher, the
policy with feedback, or the weights that an update starts from), and those that a credit rule reads.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, PositiveFloat, TypeAdapter, ValidationError, model_validator

from agentlightning.algorithms.training import Collected, Training
from agentlightning.assemble import OVERRIDDEN_CALLS, TURN_LIMIT_REACHED, shared_calls, token_tree
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.credit import (
    RETURNS,
    Aggregate,
    Assignment,
    CreditReport,
    CreditRule,
    Trains,
    group_trajectories,
    is_target,
    training_samples,
)
from agentlightning.credit.base import CallColumns, CreditContext, CreditMemory, answering, by_call, by_node, memory_key
from agentlightning.credit.rejection import Check
from agentlightning.credit.rules import ANSWER_LOGPROBS, VALUES, InformationGainCredit
from agentlightning.errors import ConfigError, PolicyError, ResumeError
from agentlightning.policy.base import ScoreColumn
from agentlightning.policy.learner import Learner
from agentlightning.policy.losses import (
    ADVANTAGES,
    INTERPOLATION,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    SAMPLED_LOGPROBS,
    STREAM_WEIGHTS,
    TEACHER_LOGPROBS,
    WEIGHTS,
    TokenLoss,
)
from agentlightning.policy.mismatch import Mismatch, Proximal, as_tuple, interpolations, is_off
from agentlightning.trajectory import CallId, FloatArray, TokenTree, TrainingSample, Trajectory, Transition
from agentlightning.util.settings import AtLeastOne, PositiveShare, Section

COMPUTED = frozenset({REF_LOGPROBS, TEACHER_LOGPROBS, PROXIMAL_LOGPROBS})


def needed_columns(
    losses: Sequence[TokenLoss], mismatch: Mismatch | None, proximal: Proximal | None = None
) -> frozenset[str]:
    """The columns that an update needs and that are computed here."""
    found = frozenset[str]().union(*(loss.needs for loss in losses)) & COMPUTED
    if proximal == "interpolate":
        return found | {INTERPOLATION}
    corrects = proximal == "pass" or (mismatch is not None and not is_off(as_tuple(mismatch)))
    corrects = corrects or (proximal is None and any(loss.needs_proximal for loss in losses))
    return found | {PROXIMAL_LOGPROBS} if corrects else found


async def with_columns(
    training: Training,
    samples: Sequence[TrainingSample],
    needed: Collection[str],
    models: Mapping[str, str | None],
    learns: Callable[[TrainingSample], bool],
) -> list[TrainingSample]:
    """The samples with the columns they lack; those that nothing is learned from need no proximal policy. `models`: by
    column, the model that scores it (see `scores_of`)."""
    found = list(samples)
    for column in sorted(needed):
        lacking = {i: each for i, each in enumerate(found) if column not in each.columns}
        if column == PROXIMAL_LOGPROBS:
            lacking = {i: each for i, each in lacking.items() if learns(each)}
        if not lacking:
            continue
        trees, learner = [each.tree for each in lacking.values()], learner_of(training)
        if column == INTERPOLATION:
            columns = [interpolations(tree, learner.policy_version, learner.updates_of) for tree in trees]
        elif column == PROXIMAL_LOGPROBS:
            adapters = [each.adapter for each in lacking.values()]
            columns = await scores_by_adapter(learner, trees, "logprobs", adapters)
        else:
            columns = await scores_of(training, trees, models[column])
        for (i, sample), values in zip(lacking.items(), columns, strict=True):
            found[i] = replace(sample, columns={**sample.columns, column: values})
    return found


async def scores_of(
    training: Training, trees: Sequence[TokenTree], model: str | None
) -> Sequence[tuple[FloatArray, ...]]:
    """The log-probabilities of each tree under another model, named as in `PolicyConfig.model`. None: under the weights
    that the run started from."""
    directory = await training.starting_weights() if model is None else Path(model)
    return (await learner_of(training).score(trees, {"ref_logprobs"}, reference=directory))["ref_logprobs"]


async def scores_by_adapter(
    learner: Learner, trees: Sequence[TokenTree], column: ScoreColumn, adapters: Sequence[str | None]
) -> list[tuple[FloatArray, ...]]:
    """A column of each tree under the adapter that it trains; None: the policy itself. The weights of an adapter are
    used for all of its trees together."""
    found: dict[int, tuple[FloatArray, ...]] = {}
    for adapter in dict.fromkeys(adapters):
        places = [i for i, own in enumerate(adapters) if own == adapter]
        scored = await learner.score([trees[i] for i in places], {column}, adapter=adapter)
        found.update(zip(places, scored[column], strict=True))
    return [found[i] for i in range(len(trees))]


def learner_of(training: Training) -> Learner:
    """The weights of a run. Raises ConfigError where it trains none."""
    if training.learner is None:
        raise ConfigError("this run trains no model, so there are no log-probabilities to compare with")
    return training.learner


# -- feedback ----------------------------------------------------------------------------------------------------------

# Feedback for self-distillation: what the policy learned only after it had answered, as a message in its prompt.
#
# A call has feedback if a tool it called failed, or if another rollout of its group solved the task that its own did
# not. The same answer is then scored after a prompt that ends with this feedback: `teacher_logprobs` (SDPO,
# arXiv:2601.20802).


class Feedback(Section):
    """What the policy is shown when it judges its own answers."""

    errors: bool = True
    """The errors of tools, for the calls that led to them."""
    siblings: bool = True
    """The answers of the best rollout of the group, for the calls of those with less reward."""
    success: float | None = None
    """The least reward of a rollout whose answers are shown. None: any that is higher than one's own."""
    rate: PositiveShare = 0.05
    """How fast the teacher follows the policy: the share of the new weights in their moving average after each step. 1:
    the teacher is the policy."""


async def with_feedback(
    training: Training,
    samples: Sequence[TrainingSample],
    trajectories: Sequence[Trajectory],
    setting: Feedback,
    trains: Trains,
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The samples with the log-probabilities of a teacher that was given feedback, and the number of calls that have
    some, and that could not be given theirs. The teacher of a call is that of the weights that it trains; calls that
    train nothing need none."""
    learner = learner_of(training)
    asked: list[tuple[Sequence[Trajectory], str | None, TokenTree]] = []
    counts = {"calls_with_feedback": 0.0, "feedback_left_out": 0.0}
    for group in group_trajectories(trajectories):
        texts = feedback_of(group, setting, learner.chat)
        changed: dict[str | None, list[Transition]] = {}
        for call in (call for each in group for call in each.transitions if call.call_id in texts):
            if (name := trains(call)) is None:
                continue
            own = reprompted(call, texts[call.call_id], learner.chat, learner.context_length)
            counts["feedback_left_out" if own is None else "calls_with_feedback"] += 1
            if own is not None:
                changed.setdefault(name or None, []).append(own)
        for adapter, calls in changed.items():
            asked.append((group, adapter, token_tree([replace(group[0], transitions=tuple(calls))])))
    column: ScoreColumn = "average_logprobs" if setting.rate < 1 else "logprobs"
    trees, adapters = [tree for *_, tree in asked], [adapter for _, adapter, _ in asked]
    known: dict[str | None, dict[CallId, FloatArray]] = {}
    for adapter, tree, values in zip(
        adapters, trees, await scores_by_adapter(learner, trees, column, adapters), strict=True
    ):
        known.setdefault(adapter, {}).update(by_call([tree], [values]))
    trained = {(each.adapter, node.rollout_id) for each in samples for node in each.tree.nodes if node.sampled}
    # A group that is in no sample of its adapter, because its rewards are all equal, gets one of its own.
    unrewarded = [
        _unrewarded(group, adapter)
        for group, adapter, _ in asked
        if not any((adapter, each.rollout_id) in trained for each in group)
    ]
    return [_with_teacher(each, known.get(each.adapter, {})) for each in (*samples, *unrewarded)], counts


def reprompted(call: Transition, text: str, chat: ChatFormat, context_length: int) -> Transition | None:
    """The call with feedback as the last message of its prompt; None where the prompt does not end as the chat template
    ends one, or the context is too short."""
    asked: list[Message] = [{"role": "user", "content": "?"}]
    before = chat.render(asked, add_generation_prompt=False)
    begin = tuple(chat.encode(chat.render(asked)[len(before) :]))
    after = chat.render([*asked, {"role": "user", "content": chat.escape(text)}])
    prompt = call.prompt_token_ids
    if not begin or prompt[-len(begin) :] != begin or not after.startswith(before):
        return None
    prompt = (*prompt[: -len(begin)], *chat.encode(after[len(before) :]))
    fits = len(prompt) + len(call.response_token_ids) <= context_length
    return replace(call, prompt_token_ids=prompt) if fits else None


def feedback_of(group: Sequence[Trajectory], setting: Feedback, chat: ChatFormat) -> dict[CallId, str]:
    """The feedback of each call of a group that has some."""
    known = {each.rollout_id: reward for each in group if (reward := each.score) is not None}
    best = max(
        (each for each in group if each.rollout_id in known), key=lambda each: known[each.rollout_id], default=None
    )
    most, success, solution = -math.inf, setting.success, ""
    if best is not None:
        most = known[best.rollout_id]
        answers = (chat.decode(call.response_token_ids, skip_special_tokens=True) for call in best.transitions)
        solution = "This attempt at the same task was better:\n\n" + "\n\n".join(answers) + "\n\n"
    found: dict[CallId, str] = {}
    for trajectory in group:
        own = known.get(trajectory.rollout_id, math.inf)
        is_shown = setting.siblings and most > own and (success is None or most >= success > own)
        errors = _errors(trajectory) if setting.errors else {}
        for call in trajectory.transitions:
            error = errors.get(call.span_id, "")
            text = (solution if is_shown else "") + (f"Your answer led to this error:\n\n{error}\n\n" if error else "")
            if text:
                found[call.call_id] = f"{text}Now answer correctly."
    return found


def _errors(trajectory: Trajectory) -> dict[str, str]:
    """By span_id of a call, the errors between it and the next one."""
    found: dict[str, str] = {}
    for step in trajectory.steps:
        before = [call for call in trajectory.transitions if call.sequence_id < step.sequence_id]
        if step.error and before:
            last = max(before, key=lambda call: call.sequence_id).span_id
            found[last] = "\n".join(filter(None, (found.get(last), f"{step.name}: {step.error}")))
    return found


def _unrewarded(group: Sequence[Trajectory], adapter: str | None) -> TrainingSample:
    tree = token_tree(group)
    zeros = [0.0] * len(tree.nodes)
    return TrainingSample(tree, columns={ADVANTAGES: zeros, WEIGHTS: zeros}, adapter=adapter, share=0.0)


def _with_teacher(sample: TrainingSample, calls: Mapping[CallId, Any]) -> TrainingSample:
    """The sample with `teacher_logprobs`, and with weights of the reference stream for the calls that have feedback."""
    columns = {
        **sample.columns,
        TEACHER_LOGPROBS: by_node(sample.tree, calls),
        STREAM_WEIGHTS["reference_kl"]: [float(node.call_id in calls) for node in sample.tree.nodes],
    }
    return replace(sample, columns=columns, share=sample.share)


# -- credit of a step --------------------------------------------------------------------------------------------------

# The credit of a step: asks the policy for the columns that a credit rule reads, and keeps what the rule remembers.


@dataclass(frozen=True, slots=True)
class CreditAssigner:
    """Turns the trajectories of each step into training samples."""

    assignment: Assignment
    aggregate: Aggregate | Mapping[str, Any] = "rollout"
    trains_values: bool = False
    """Whether a loss trains the policy's value head, so that rules may use its values."""
    memory: CreditMemory = field(default_factory=CreditMemory)

    async def samples(
        self, training: Training, trajectories: Sequence[Trajectory], trains: Trains | None = None
    ) -> tuple[list[TrainingSample], CreditReport]:
        """The samples of one step, and what became of its groups. `trains` says what each call trains."""
        groups = group_trajectories(trajectories)
        columns = await self._columns(training, groups)
        return await asyncio.to_thread(
            training_samples,
            groups,
            self.assignment,
            aggregate=self.aggregate,
            trains=trains,
            context=CreditContext(self.memory, columns),
        )

    async def _columns(self, training: Training, groups: Sequence[Sequence[Trajectory]]) -> CallColumns:
        rule = self.assignment.rule
        wanted = rule.needs | (rule.uses if self.trains_values else frozenset())
        if not wanted or not any(each.transitions for group in groups for each in group):
            return {}
        if (learner := training.learner) is None:
            raise ConfigError(f'credit rule "{rule.type}" needs {sorted(wanted)} of a policy, and this run trains none')
        found: dict[str, Mapping[CallId, Any]] = {}
        for name in sorted(wanted):
            of_answers = rule if name == ANSWER_LOGPROBS and isinstance(rule, InformationGainCredit) else None
            column: Any = "logprobs" if of_answers else name
            trees = await asyncio.to_thread(_trees, groups, of_answers, learner)
            try:
                calls = by_call(trees, (await learner.score(trees, {column}))[column])
            except PolicyError as error:
                message = f'credit rule "{rule.type}" needs the column {column!r} of the policy: {error}'
                raise ConfigError(message) from error
            found[name] = calls if of_answers else with_shared(calls, groups)
        return found


def with_shared(found: Mapping[CallId, Any], groups: Sequence[Sequence[Trajectory]]) -> Mapping[CallId, Any]:
    """The numbers of each call, those of calls that repeat a recorded answer too."""
    shared = {call: first for group in groups for call, first in shared_calls(group).items()}
    return {**found, **{call: found[first] for call, first in shared.items() if first in found}}


def _trees(
    groups: Sequence[Sequence[Trajectory]], of_answers: InformationGainCredit | None, learner: Learner
) -> list[TokenTree]:
    """The tree of each group; with a rule `of_answers`, of its prompts followed by the known answers."""
    if of_answers is not None:
        every = [each for group in groups for each in group]
        answers = {each.rollout_id: learner.chat.encode(of_answers.answer_text(each)) for each in every}
        groups = [answering(group, answers) for group in groups]
    return [token_tree(group) for group in groups]


# -- settings ----------------------------------------------------------------------------------------------------------


def trains_values(losses: Any) -> bool:
    """Whether one of the losses trains a value head."""
    several = losses if isinstance(losses, Sequence) else (losses,)
    return any(RETURNS in loss.needs for loss in several)


def check_value_head(losses: Any, value_head: object) -> None:
    """Raises ConfigError for a loss that trains a value head which the policy does not have."""
    if trains_values(losses) and value_head is None:
        raise ConfigError(
            'loss "value" trains a critic, and the policy has no value head; set policy.value_head="linear" (or "mlp"),'
            " or leave the loss out"
        )


def check_critic(rule: CreditRule, losses: Any) -> None:
    """Raises ConfigError for a critic that no rule gives returns to, and for a rule with values that no loss trains."""
    if trains_values(losses) and not rule.gives_returns:
        raise ConfigError(
            f'loss "value" trains a critic on returns, which credit rule "{rule.type}" does not give; use '
            'credit="value", "state_value" or "hierarchical", or leave the loss out'
        )
    if VALUES in rule.needs and not trains_values(losses):
        raise ConfigError(
            f'credit rule "{rule.type}" needs the values of a trained critic: set policy.value_head="linear" and '
            'loss=["ppo", "value"]'
        )


# -- rewards and groups ------------------------------------------------------------------------------------------------

# What a step does to its rewards and groups before credit: truncation, penalties, and which groups are learned
# from.


# -- truncation ------------------------------------------------------------------------------------------------------

# Rollouts that were cut off, by the token limit of an answer or by the limit on turns, and what is learned from
# them.

LENGTH = "length"
"""The finish reason of an answer that reached its limit."""


def truncated_rollouts(trajectories: Sequence[Trajectory], target_agent: str | None = None) -> frozenset[str]:
    """The ids of rollouts in which an answer of an agent to train was cut off, or a further call was refused."""
    return frozenset(
        each.rollout_id
        for each in trajectories
        if TURN_LIMIT_REACHED in each.metadata
        or any(call.finish_reason == LENGTH and is_target(call.agent, target_agent) for call in each.transitions)
    )


def without_weight(samples: Sequence[TrainingSample], rollouts: Collection[str]) -> list[TrainingSample]:
    """The samples with weight 0 for some rollouts. The others weigh what they did."""
    return [
        replace(
            sample,
            weights=[
                weights * (node.rollout_id not in rollouts)
                for node, weights in zip(sample.tree.nodes, sample.weights, strict=True)
            ],
            share=sample.share,
        )
        for sample in samples
    ]


# -- group filter ----------------------------------------------------------------------------------------------------

# Keeps the groups of a batch whose rewards differ most: those that teach, at the price of fewer rollouts in an update.
#
# The uncertainty filter of StarPO-S (Wang et al. 2025, RAGEN, arXiv:2504.20073, section 4.2): groups are ordered by the
# standard deviation of their rewards, and the first share of them is learned from.


def most_uncertain(groups: Sequence[list[Trajectory]], share: float) -> list[list[Trajectory]]:
    """That share of the groups, rounded up, in their order. Of equal ones the earlier are kept."""
    count = math.ceil(share * len(groups))
    if count >= len(groups):
        return list(groups)
    known = [[score for each in group if (score := each.score) is not None] for group in groups]
    spreads = [statistics.pstdev(own) if own else -1.0 for own in known]
    kept = sorted(sorted(range(len(groups)), key=lambda index: -spreads[index])[:count])
    return [groups[index] for index in kept]


def groups_with_spread(trajectories: Sequence[Trajectory]) -> int:
    """The number of groups in which rewards differ."""
    rewards = [{each.score for each in group} for group in group_trajectories(trajectories)]
    return sum(len(each - {None}) > 1 for each in rewards)


class OverlongPenalty(Section):
    """A penalty for rollouts with too many sampled tokens, which grows from 0 over the last `buffer` tokens."""

    max_tokens: AtLeastOne
    """Sampled tokens of a rollout from which the whole penalty applies."""
    buffer: AtLeastOne
    """The number of tokens before these over which it grows."""
    penalty: PositiveFloat = 1.0
    """What is taken from the reward of a rollout that is too long."""

    @model_validator(mode="after")
    def _check_buffer(self) -> OverlongPenalty:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer={self.buffer} is longer than max_tokens={self.max_tokens}; make it shorter")
        return self

    def of_length(self, tokens: int) -> float:
        """What is added to the reward, 0 or negative."""
        free = self.max_tokens - self.buffer
        return self.penalty * max(-1.0, min(0.0, (free - tokens) / self.buffer))


def with_overlong_penalty(
    trajectories: Sequence[Trajectory], setting: OverlongPenalty, target_agent: str | None = None
) -> tuple[list[Trajectory], dict[str, float]]:
    """The trajectories with the penalty in their rewards, and its mean and the number of rollouts it applies to."""
    calls = [[call for call in each.transitions if is_target(call.agent, target_agent)] for each in trajectories]
    penalties = [setting.of_length(sum(len(call.response_token_ids) for call in own)) for own in calls]
    return _changed(trajectories, penalties), {
        "overlong_penalty": _mean(penalties),
        "overlong_rollouts": float(sum(penalty < 0 for penalty in penalties)),
    }


async def with_kl_penalty(
    training: Training,
    trajectories: Sequence[Trajectory],
    coefficient: float,
    reference: str | None,
    target_agent: str | None = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """The trajectories with `coefficient` times their divergence from the `reference` taken from their rewards, and the
    mean divergence of a rollout in nats."""
    groups = group_trajectories(trajectories)
    trees = [token_tree(group) for group in groups]
    columns = await scores_of(training, trees, reference)
    known = with_shared(by_call(trees, columns), groups)
    divergence = [
        sum(
            sum(call.logprobs) - float(known[call.call_id].sum(dtype="float64"))
            for call in each.transitions
            if call.call_id in known and is_target(call.agent, target_agent)
        )
        for each in trajectories
    ]
    changes = [-coefficient * own for own in divergence]
    return _changed(trajectories, changes), {"reward_kl": _mean(divergence)}


def _changed(trajectories: Sequence[Trajectory], changes: Sequence[float]) -> list[Trajectory]:
    """The trajectories with a number added to each reward that is known."""
    return [
        each if (reward := each.score) is None or not change else replace(each, reward=reward + change)
        for each, change in zip(trajectories, changes, strict=True)
    ]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


def reward_metrics(collected: Collected) -> Mapping[str, float]:
    """Mean reward of a batch, without missing rewards, and counts of its calls."""
    known = [reward for each in collected.trajectories if (reward := each.score) is not None]
    calls = sum(len(each.transitions) for each in collected.trajectories)
    return {
        "reward": sum(known) / len(known) if known else float("nan"),
        "calls_per_rollout": calls / max(1, len(collected.trajectories)),
        "calls_overridden": sum(each.metadata.get(OVERRIDDEN_CALLS, 0) for each in collected.trajectories),
    }


# -- replay ------------------------------------------------------------------------------------------------------------

# Replay of recent successes: a group in which no rollout succeeded is joined by earlier successes at its task.
#
# Such a group has no spread of rewards and teaches nothing; with a success it does. The replayed tokens keep the
# log-probabilities that they were sampled with, so a loss weighs them by pi / pi_sampled as any tokens of older
# weights. The buffer holds ids only: rollouts are read from the store again, and those that are too old, removed, or of
# no use to the algorithm any more are forgotten and counted.


REPLAYED = "replayed_rollouts"
DROPPED = "replay_dropped"
SIZE = "replay_size"


class Replay(Section):
    """Which successful rollouts are kept, for how long, and how many of them join a group without success."""

    capacity: AtLeastOne = 64
    """Rollouts that are kept, of all tasks together; the oldest are forgotten first."""
    max_age: AtLeastOne = 4
    """Updates by which a replayed token may be older than the weights that learn from it."""
    success: FiniteFloat = 1.0
    """The least reward of a rollout that has succeeded."""
    rollouts: AtLeastOne = 1
    """Successful rollouts that join a group without any, the newest first; as many are kept of each task."""


def check_losses(losses: Sequence[TokenLoss]) -> None:
    """Raises ConfigError for losses that would train replayed tokens as if the present weights had sampled them."""
    if not any({ADVANTAGES, SAMPLED_LOGPROBS} <= loss.needs for loss in losses):
        names = ", ".join(f'"{loss.type}"' for loss in losses)
        raise ConfigError(
            f"replay gives the losses {names} tokens of older weights, and none has a ratio that corrects for these; "
            "leave replay out, or use ppo"
        )
    for loss in losses:
        if loss.type == "nll":
            raise ConfigError('loss "nll" imitates replayed tokens without a ratio; leave replay or the loss out')


@dataclass(slots=True)
class ReplayBuffer:
    """The ids of recent successful rollouts by task, the task that succeeded last at the end."""

    config: Replay
    _ids: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By task, the oldest first."""

    @property
    def size(self) -> int:
        """The number of rollouts that it holds."""
        return sum(map(len, self._ids.values()))

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Keep those that succeeded, as far as there is room."""
        for group in group_trajectories(trajectories):
            new = [each.rollout_id for each in group if each.status == "succeeded" and self._succeeded(each)]
            if new:
                task = memory_key(group)
                kept = [each for each in self._ids.pop(task, []) if each not in new]
                self._ids[task] = [*kept, *new][-self.config.rollouts :]
        self._forget_oldest()

    async def for_groups(
        self, training: Training, trajectories: Sequence[Trajectory], check: Check, joined: Sequence[Trajectory] = ()
    ) -> tuple[tuple[Trajectory, ...], dict[str, int]]:
        """The rollouts that join the groups of `trajectories` without success, and the counts for the step's metrics.
        Each joins one group of a step: not if it is among those that have `joined` one."""
        groups = group_trajectories(trajectories)
        own = {each.rollout_id for each in (*trajectories, *joined)}
        joins: dict[str, Trajectory] = {}
        for group in groups:
            if not any(map(self._succeeded, group)):
                for rollout_id in self._ids.get(memory_key(group), []):
                    if rollout_id not in own:
                        joins.setdefault(rollout_id, group[0])
        found = await training.recall(
            {rollout_id: first.group for rollout_id, first in joins.items()},
            tasks={rollout_id: first.task for rollout_id, first in joins.items()},
            max_age=self.config.max_age,
            check=check,
        )
        usable = tuple(each for each in found if self._succeeded(each))
        dropped = joins.keys() - {each.rollout_id for each in usable}
        for rollout_id in dropped:
            self._forget(memory_key([joins[rollout_id]]), rollout_id)
        return usable, {REPLAYED: len(usable), DROPPED: len(dropped)}

    def state_dict(self) -> dict[str, list[str]]:
        """All of it, as JSON can hold it."""
        return {task: list(ids) for task, ids in self._ids.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all of it. Raises ResumeError for what `state_dict` cannot have written."""
        try:
            self._ids = TypeAdapter(dict[str, list[str]]).validate_python(state)
        except ValidationError as error:
            raise ResumeError(f"the rollouts to replay cannot be read: {error!r}; start a new run") from error
        self._forget_oldest()

    def _succeeded(self, trajectory: Trajectory) -> bool:
        reward = trajectory.score
        return reward is not None and reward >= self.config.success

    def _forget_oldest(self) -> None:
        while self.size > self.config.capacity:
            task = next(iter(self._ids))
            self._forget(task, self._ids[task][0])

    def _forget(self, task: str, rollout_id: str) -> None:
        self._ids[task].remove(rollout_id)
        if not self._ids[task]:
            del self._ids[task]
