"""LightningRL: reinforcement learning of an agent from whole rollouts (arXiv 2508.03680, section 3).

It has two levels. For the episode, a *credit rule* gives every model call of a rollout its advantage; with
`credit="group_relative"` and groups of rollouts of one task it is that of GRPO (arXiv 2402.03300, equation 4):

    A_i = (R_i - mean(R)) / std(R)         over the group, the same for every call of rollout i

For the token, a *loss* uses that advantage; `ppo` is the clipped ratio (arXiv 1707.06347, equation 7)

    L = - sum_t  w_t  min( r_t A,  clip(r_t, 1 - clip_low, 1 + clip_high) A ),   r_t = pi(t) / pi_sampled(t)

with w_t such that every rollout has the same weight whatever its number of calls (`aggregate="rollout"`), or every
token has (`aggregate="token"`). `preset` names published combinations of the two. Groups whose rewards are all equal
have advantages of 0; they are counted, and stay in the batch unless `equal_groups` filters them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, Self

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from agentlightning.algorithms.base import (
    RolloutsAlgorithm,
    RolloutsConfig,
    learner_of,
    reward_metrics,
    scores_of,
    without_any_call,
)
from agentlightning.algorithms.training import Collected, Training
from agentlightning.assemble import TURN_LIMIT_REACHED, shared_calls, token_tree
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.credit import (
    OWN,
    RETURNS,
    AgentRewards,
    Aggregate,
    Assignment,
    CreditReport,
    CreditRule,
    EqualGroups,
    Normalization,
    Trains,
    group_trajectories,
    is_target,
    names_of,
    read_normalization,
    rejections,
    training_samples,
)
from agentlightning.credit.base import (
    CallColumns,
    CreditContext,
    CreditMemory,
    answering,
    by_call,
    by_node,
    canonical_credit,
    memory_key,
)
from agentlightning.credit.rejection import Check, Rejection
from agentlightning.credit.rules import ANSWER_LOGPROBS, VALUES, InformationGainCredit
from agentlightning.errors import ConfigError, PolicyError, ResumeError
from agentlightning.policy.base import Metrics, ScoreColumn, UpdateOptions
from agentlightning.policy.config import BASE, AgentSetting, Lora, adapters_of
from agentlightning.policy.learner import Learner
from agentlightning.policy.losses import (
    ADVANTAGES,
    INTERPOLATION,
    LOSSES,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    SAMPLED_LOGPROBS,
    STREAM_WEIGHTS,
    TEACHER_LOGPROBS,
    WEIGHTS,
    Loss,
    PPOLoss,
    PreferenceLoss,
    TokenLoss,
    token_losses,
)
from agentlightning.policy.mismatch import (
    Mismatch,
    Proximal,
    as_tuple,
    check_combination,
    check_proximal,
    interpolations,
    is_off,
)
from agentlightning.trajectory import CallId, FloatArray, TokenTree, TrainingSample, Trajectory, Transition
from agentlightning.util.settings import AtLeastOne, PositiveShare, Section

# -- agents ------------------------------------------------------------------------------------------------------------

# What the calls of each agent train: an adapter of its own, what all shared agents train together, or nothing.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentRoles:
    """The setting `agents`. Without any, all agents train the policy itself."""

    agents: Mapping[str, AgentSetting] = field(default_factory=dict[str, AgentSetting])
    _named: set[str] = field(default_factory=set[str])
    """Agents that are not listed and were named in a warning."""

    def check(self, target: str | None) -> None:
        """Raises ConfigError where nothing would be trained, or nothing that `target` selects."""
        if not self.agents:
            return
        adapters_of(None, self.agents)
        learning = sorted(name for name, setting in self.agents.items() if setting != "frozen")
        if not any(is_target(name, target) for name in learning):
            raise ConfigError(f"target_agent={target!r} selects none of the agents that learn: {', '.join(learning)}")

    def check_answers(self, rule: str) -> None:
        """Raises ConfigError for a rule that compares p(answer) from one call to the next, where calls have different
        weights: the difference would be that of the weights."""
        own = sorted(name for name, setting in self.agents.items() if isinstance(setting, Lora))
        if own:
            raise ConfigError(
                f'credit="{rule}" compares the probability of the answer from one call to the next, which needs the '
                f"same weights for all calls, and agents gives an adapter of its own to {', '.join(map(repr, own))}; "
                'use agents with "shared" and "frozen" only, or another credit rule'
            )

    def trains(self, call: Transition, target: str | None = None) -> str | None:
        """What a call trains: an adapter, `OWN`, or None for nothing, as one of an agent that `target` does not select.
        The weights that answered decide; where they are not known, the agent does."""
        if not is_target(call.agent, target):
            return None
        if not self.agents:
            return OWN
        answered = _adapter(call)
        if answered == BASE:
            return None
        name = answered if isinstance(self.agents.get(answered), Lora) else call.agent or ""
        setting = self.agents.get(name)
        if isinstance(setting, Lora):
            return name
        return OWN if setting == "shared" else None

    def check_seen(self, trajectories: Sequence[Trajectory], target: str | None) -> None:
        """Raises ConfigError for an agent with an adapter that made none of the calls."""
        calls = [call for trajectory in trajectories for call in trajectory.transitions]
        seen = {name for call in calls for name in (call.agent, _adapter(call)) if name in self.agents}
        missing = sorted(
            name
            for name, setting in self.agents.items()
            if isinstance(setting, Lora) and name not in seen and is_target(name, target)
        )
        if missing and calls:
            raise ConfigError(
                f"agents gives an adapter to {', '.join(map(repr, missing))}, and no call of the first "
                f"{len(trajectories)} rollouts is of that name; there are {names_of(call.agent for call in calls)}."
                " Rename it in agents, or name the agent with agl.track_agent"
            )

    def counts(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """How many calls train nothing because of this setting: of frozen agents, and of agents that it does not list,
        which are named once."""
        if not self.agents:
            return {}
        calls = [call for trajectory in trajectories for call in trajectory.transitions if self.trains(call) is None]
        unlisted = Counter(call.agent or "" for call in calls if call.agent not in self.agents)
        if new := sorted(unlisted.keys() - self._named):
            self._named.update(new)
            logger.warning(
                "calls of %s train nothing, because agents does not list them; they are answered as frozen agents are",
                ", ".join(repr(name) if name else "agents without a name" for name in new),
            )
        return {"calls_frozen": float(len(calls) - unlisted.total()), "calls_unlisted": float(unlisted.total())}


def _adapter(call: Transition) -> str:
    """The adapter that answered, as the model's name says; "" for the policy itself."""
    policy, _, adapter = (call.model or "").rpartition(":")
    return adapter if policy else ""


# -- columns -----------------------------------------------------------------------------------------------------------

# What a step asks the policy for: the columns that losses need and samples lack (log-probabilities under a reference, a
# teacher, the policy with feedback, or the weights that an update starts from), and those that a credit rule reads.

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


def trains_values(losses: Sequence[TokenLoss]) -> bool:
    """Whether one of the losses trains a value head."""
    return any(RETURNS in loss.needs for loss in losses)


def check_value_head(losses: Sequence[TokenLoss], value_head: object) -> None:
    """Raises ConfigError for a loss that trains a value head which the policy does not have."""
    if trains_values(losses) and value_head is None:
        raise ConfigError(
            'loss "value" trains a critic, and the policy has no value head; set policy.value_head="linear" (or "mlp"),'
            " or leave the loss out"
        )


def check_critic(rule: CreditRule, losses: Sequence[TokenLoss]) -> None:
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

CUT_OFF = "length"
"""The finish reason of an answer that reached its limit."""


def truncated_rollouts(trajectories: Sequence[Trajectory], target_agent: str | None = None) -> frozenset[str]:
    """The ids of rollouts in which an answer of an agent to train was cut off, or a further call was refused."""
    return frozenset(
        each.rollout_id
        for each in trajectories
        if TURN_LIMIT_REACHED in each.metadata
        or any(call.finish_reason == CUT_OFF and is_target(call.agent, target_agent) for call in each.transitions)
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


# -- presets -----------------------------------------------------------------------------------------------------------

# Presets of LightningRL: the settings that published algorithms consist of, by name.
#
# A preset fills in the settings that are not given; those that are given win. The configuration of a run shows the
# settings in effect. All but `dapo` keep groups whose rewards are all equal, as their papers do.
#
#     grpo        Shao et al. 2024, arXiv:2402.03300, section 4.1: clipped ratio and k3 divergence from the reference
#     dr_grpo     Liu et al. 2025, arXiv:2503.20783: no division by the standard deviation or by a response's length
#     dapo        Yu et al. 2025, arXiv:2503.14476: clip-higher, dynamic sampling, groups with equal rewards filtered,
#                 tokens of equal weight; `overlong`, which depends on the task, is left to you
#     gspo        Zheng et al. 2025, arXiv:2507.18071: one ratio for each rollout
#     cispo       MiniMax 2025, arXiv:2506.13585: the clipped ratio as a weight
#     sapo        Gao et al. 2025, arXiv:2511.20347: a smooth gate in place of a clip
#     dppo        arXiv:2602.04879: a mask by the change of probability, advantages as in Dr. GRPO
#     reinforce++ Hu et al. 2025, arXiv:2501.03262: rewards less a divergence, normalised over the batch, clipped ratio
#     rloo        Ahmadian et al. 2024, arXiv:2402.14740: leave-one-out baseline, REINFORCE, whole responses as actions
#     loop        Chen et al. 2025, arXiv:2502.01600: leave-one-out baseline, clipped ratio, one model in memory

LENGTH: Final = 1024
"""Tokens by which "constant" normalizers divide, unless `aggregate` says otherwise."""
BY_LENGTH: Final = {"type": "constant", "length": LENGTH}
WITHOUT_STD: Final = {"type": "group_relative", "normalize_std": False}
CLIP: Final = {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "grpo": {
            "credit": "group_relative",
            "aggregate": "rollout",
            "loss": [CLIP, {"type": "kl", "coefficient": 0.04, "estimator": "k3"}],
        },
        "dr_grpo": {"credit": WITHOUT_STD, "aggregate": BY_LENGTH, "loss": CLIP},
        "dapo": {
            "credit": "group_relative",
            "aggregate": "token",
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28},
            "dynamic_sampling": 3,
        },
        "gspo": {"credit": "group_relative", "aggregate": "rollout", "loss": "gspo"},
        "cispo": {"credit": "group_relative", "aggregate": "token", "loss": "cispo"},
        "sapo": {"credit": "group_relative", "aggregate": "rollout", "loss": "sapo"},
        "dppo": {"credit": WITHOUT_STD, "aggregate": "token", "loss": "dppo"},
        "reinforce++": {
            "credit": "reinforce",
            "normalization": {"type": "batch", "center": True},
            "aggregate": "token",
            "loss": CLIP,
            "kl_in_reward": 0.01,
        },
        "rloo": {"credit": "leave_one_out", "aggregate": BY_LENGTH, "loss": {"type": "importance", "level": "rollout"}},
        "loop": {"credit": "leave_one_out", "aggregate": "rollout", "loss": CLIP},
    }
)
"""By name, the settings of `LightningRLConfig` that a preset fills in."""


class LightningRLConfig(RolloutsConfig):
    """The settings of LightningRL.

    >>> agl.config.LightningRLConfig(steps=50, group_size=4).tasks_per_step
    16
    """

    type: str = "lightning_rl"
    """Which algorithm this is."""
    preset: str | None = None
    """A published algorithm whose settings are used where none are given: grpo, dr_grpo, dapo, gspo, cispo, sapo, dppo,
    reinforce++, rloo or loop."""
    group_size: int = 8
    """Rollouts of each task; their mean reward is the baseline."""
    top_p: PositiveShare = 1.0
    """Training rollouts are sampled from the most likely tokens that together have this probability. Below 1 these sets
    are recorded, and the policy's probabilities are those over them (`policy.max_kept_tokens`)."""
    top_k: NonNegativeInt = 0
    """Training rollouts are sampled from so many of the most likely tokens, recorded likewise. 0: from all."""
    credit: Annotated[str | dict[str, Any], BeforeValidator(canonical_credit)] = "group_relative"
    """The episode-level credit rule: its name, or a table with its `type` and settings. `credit_assignment` is another
    name of this setting."""
    normalization: Annotated[Normalization, BeforeValidator(read_normalization)] = Normalization()
    """What advantages are divided by: rule (as the formula of the credit rule says), none, group, batch, agent, max_rl
    or gdpo; or a table with `type` and `center`."""
    agent_rewards: AgentRewards = "shared"
    """Whose reward the calls of an agent are credited with where rewards were emitted for single agents: shared (the
    rollout's), own (the agent's), or difference (the rollout's less the agent's, which is then what the rollout would
    have earned without it)."""
    aggregate: Aggregate = "rollout"
    """What has the same weight in the loss: every rollout, or every sampled token; or a table with type "constant" and
    the length that each rollout's loss is divided by."""
    loss: Loss = PPOLoss()
    """The token-level loss: a name, a table with its `type` and settings, or a list of these, which add up."""
    mismatch: Mismatch | None = None
    """Corrections of the difference between the sampler's probabilities and the trainer's: truncate, icepop,
    geometric_mask, sequence_mask, off, a table with settings, or a list of these, which multiply. They need one more
    forward pass over each batch. None: truncation at 2 where samples have `proximal_logprobs` anyway."""
    proximal: Proximal | None = None
    """What ratios are against and clipped around: behavior (the recorded log-probabilities), pass (those of the weights
    that the update starts from, by one more forward pass), or interpolate (between the recorded ones and those being
    trained, by the age of a token and without a pass; for rollouts of older weights). The difference from the recorded
    ones is corrected as `mismatch` says. None: pass where `mismatch` is set and with loss "gspo", else behavior."""
    reference: str | None = None
    """The model that loss "kl" and `kl_in_reward` keep the policy near, named as `policy.model`. None: the
    weights that the run started from; with adapters, those below them."""
    teacher: str | None = None
    """The model that loss "distill" learns from, named as `policy.model`, with the policy's tokenizer."""
    feedback: Feedback | None = None
    """What the policy is shown after it has answered, for loss "sdpo": errors of tools, answers of better rollouts.
    None: both."""
    kl_in_reward: NonNegativeFloat = 0.0
    """What each nat of divergence from the reference costs a rollout, taken from its reward."""
    overlong: OverlongPenalty | None = None
    """A penalty for rollouts with too many sampled tokens (DAPO): a table with `max_tokens` and `buffer`."""
    truncated_reward: FiniteFloat | None = None
    """The reward of a rollout in which an answer was cut off by its token limit, or that ended at its limit of turns.
    None: the reward it was given."""
    mask_truncated: bool = False
    """Whether such rollouts count in the baseline of their group only, and are not learned from."""
    dynamic_sampling: NonNegativeInt = 0
    """How often a step may request further tasks in place of those whose rollouts all had the same reward (DAPO)."""
    equal_groups: EqualGroups | None = None
    """What becomes of groups whose rewards are all equal: keep, they count in what the loss is divided by, and in
    losses that read no advantages, such as kl and distill (GRPO); filter, they are left out of the batch (DAPO). None:
    filter with `dynamic_sampling`, which requests others in their place, and with loss "awr", which would imitate
    groups that all failed; else keep."""
    replay: Replay | None = None
    """Recent successful rollouts that join groups of their task in which none succeeded: a table with `capacity`,
    `max_age`, `success` and `rollouts`. None: none are kept."""
    keep_groups: PositiveShare = 1.0
    """The share of a step's groups that is learned from: those whose rewards differ most (StarPO-S)."""
    minibatches: AtLeastOne = 1
    """Optimiser steps for each batch of rollouts, each over its own share of the groups."""
    timeout_reward: FiniteFloat | None = None
    """The reward of a rollout that timed out, whose calls are then learned from. None: it has failed and is left out,
    so that nothing teaches the policy to be quicker."""
    agents: dict[str, AgentSetting] = Field(default={})
    """What the calls of each agent train: an adapter of its own (a table with type "lora", r ...), nothing ("frozen"),
    or what all "shared" agents train together. Agents that are not listed are frozen; without any, all are shared."""

    @classmethod
    def expand_preset(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with those of their preset that are not among them, and `credit` in place of
        `credit_assignment`. Raises ConfigError for an unknown preset, and where these two differ."""
        given = dict(settings)
        if "credit_assignment" in given:
            other = given.pop("credit_assignment")
            if canonical_credit(credit := given.setdefault("credit", other)) != canonical_credit(other):
                raise ConfigError(
                    f"credit={credit!r} and credit_assignment={other!r} are two names of one setting; give one of them"
                )
        name = given.get("preset")
        if name in (None, "none"):
            return given
        if name not in PRESETS:
            raise ConfigError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
        return {**PRESETS[name], **given}

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, settings: Any) -> Any:
        return cls.expand_preset(settings) if isinstance(settings, Mapping) else settings

    @property
    def losses(self) -> tuple[TokenLoss, ...]:
        """The losses, one or several."""
        return token_losses(self.loss)

    @property
    def reads_advantages(self) -> bool:
        """Whether rewards play a part in one of the losses."""
        return any(ADVANTAGES in loss.needs for loss in self.losses)

    @model_validator(mode="after")
    def _check_losses(self) -> Self:
        if self.mismatch is not None:
            check_combination(self.mismatch, self.losses)
        check_proximal(self.proximal, self.losses, self.mismatch)
        if self.proximal == "interpolate" and self.agents:
            raise ValueError('proximal="interpolate" counts versions of one policy; with agents use "pass"')
        if self.replay is not None:
            check_losses(self.losses)
        if self.equal_groups == "filter" and not self.reads_advantages:
            names = ", ".join(f'"{loss.type}"' for loss in self.losses)
            raise ValueError(f'equal_groups="filter" goes by rewards, which play no part in loss {names}; keep them')
        types = {loss.type for loss in self.losses}
        if pairs := [loss.type for loss in self.losses if isinstance(loss, PreferenceLoss)]:
            raise ValueError(
                f'loss "{pairs[0]}" learns from preferences, which rollouts with rewards do not give; use'
                f' algorithm.type="dpo" with algorithm.loss="{pairs[0]}" (agl dpo, agl.DPO)'
            )
        # The teacher of "sdpo" is the policy itself.
        taught = [loss.type for loss in self.losses if TEACHER_LOGPROBS in loss.needs and loss.type != "sdpo"]
        if taught and self.teacher is None:
            raise ValueError(f'loss "{taught[0]}" learns from a teacher; set teacher=DIRECTORY of a model')
        if self.teacher is not None and not taught:
            raise ValueError(f'teacher={self.teacher!r} is used by no loss; add "distill", or leave it out')
        if self.feedback is not None and "sdpo" not in types:
            raise ValueError('feedback is used by no loss; add "sdpo", or leave it out')
        shapes = self.kl_in_reward or self.overlong is not None or self.truncated_reward is not None
        if shapes and (self.agent_rewards != "shared" or self.normalization.type == "gdpo"):
            raise ValueError(
                "kl_in_reward, overlong and truncated_reward change the one reward of a rollout; use them with"
                ' agent_rewards="shared" and without normalization "gdpo"'
            )
        if taught and "sdpo" in types:
            raise ValueError(
                f'losses "sdpo" and "{taught[0]}" have different teachers for the same tokens; use one of them'
            )
        return self

    @field_validator("loss", mode="before")
    @classmethod
    def _refuse_presets(cls, setting: Any) -> Any:
        if isinstance(setting, str) and setting in PRESETS.keys() - {*LOSSES.names()}:
            raise ValueError(f'"{setting}" is a preset, a loss with its credit rule: set preset="{setting}"')
        return setting

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        self.optimizer.check_warmup(self.steps * self.minibatches)
        roles, rule = AgentRoles(self.agents), assignment_of(self).rule
        roles.check(self.target_agent)
        rule.check_group_size(self.group_size)
        check_critic(rule, self.losses)
        if ANSWER_LOGPROBS in rule.needs:
            roles.check_answers(rule.type)
        return self


def assignment_of(config: LightningRLConfig) -> Assignment:
    """The credit rule and the settings around it. Raises ConfigError where they do not go together."""
    imitates = any(ADVANTAGES in loss.needs and loss.trains_zero_advantage for loss in config.losses)
    filters = imitates or (config.dynamic_sampling > 0 and config.reads_advantages)
    equal_groups = config.equal_groups or ("filter" if filters else "keep")
    made = Assignment.of(config.credit, config.normalization, config.agent_rewards, config.reward_weights, equal_groups)
    return replace(made, uses_rewards=config.reads_advantages)


def shape_rewards(
    trajectories: Sequence[Trajectory], config: LightningRLConfig, target: str | None
) -> tuple[Sequence[Trajectory], dict[str, float]]:
    """The trajectories with what they themselves change of their rewards, and its metrics."""
    metrics: dict[str, float] = {}
    if config.truncated_reward is not None:
        cut, reward = truncated_rollouts(trajectories, target), config.truncated_reward
        trajectories = [replace(each, reward=reward) if each.rollout_id in cut else each for each in trajectories]
    if config.overlong is not None:
        trajectories, metrics = with_overlong_penalty(trajectories, config.overlong, target)
    return trajectories, metrics


class LightningRL(RolloutsAlgorithm[LightningRLConfig]):
    """Reinforcement learning with a credit rule for the episode and a loss for the token.

    `settings` are the fields of `LightningRLConfig`, over those of `config`; `store` holds the sessions that
    `Trainer.train` learns from, unless the trainer has one. Raises ConfigError for settings that cannot work.

        >>> agl.LightningRL(steps=50, group_size=4).total_steps
        50
    """

    name = "lightning_rl"
    config_class = LightningRLConfig

    def __init__(self, config: LightningRLConfig | None = None, *, store: Any = None, **settings: Any) -> None:
        self.store = store
        super().__init__(config, **settings)
        self._roles = AgentRoles(self.config.agents)
        self._credit = CreditAssigner(
            assignment_of(self.config), self.config.aggregate, trains_values=trains_values(self.config.losses)
        )
        replay = self.config.replay
        self._replay = None if replay is None else ReplayBuffer(replay)

    def with_settings(self, values: Mapping[str, Any], source: str) -> Self:
        found = super().with_settings(values, source)
        LightningRL.__init__(found, found.config, store=self.store)
        return found

    def state_dict(self) -> Mapping[str, Any]:
        """What the credit rule remembers of tasks, and the ids of rollouts to replay; empty if there is neither."""
        memory, replay = self._credit.memory, self._replay
        return {
            **({"credit_memory": memory.state_dict()} if memory.size else {}),
            **({"replay": replay.state_dict()} if replay is not None and replay.size else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._credit.memory.load_state_dict(state.get("credit_memory", {"tables": {}}))
        if self._replay is not None:
            self._replay.load_state_dict(state.get("replay", {}))

    def check_staleness(self, max_staleness: int) -> None:
        super().check_staleness(max_staleness)
        if self.config.proximal == "interpolate" and not max_staleness and self.config.replay is None:
            raise ConfigError(
                'proximal="interpolate" does nothing with run.max_staleness=0, where no token is of older weights;'
                " raise max_staleness, or leave proximal out"
            )

    async def _step(self, training: Training) -> None:
        config, target = self.config, self._target(training)
        collected, replayed, counts = await self._collect(training, target)
        learned = (*collected.trajectories, *replayed)
        if training.step == 0:
            self._roles.check_seen(collected.trajectories, target)
        trajectories, shaping = await self._shaped(training, learned, target)
        trajectories, filtered = self._filtered(trajectories)
        trains = partial(self._roles.trains, target=target)
        samples, report = await self._credit.samples(training, trajectories, trains)
        counts |= filtered | self._roles.counts(collected.trajectories)
        metrics = {
            **reward_metrics(collected),
            **counts,
            "rollouts_truncated": float(len(truncated_rollouts(collected.trajectories, target))),
            **shaping,
            **report.metrics(),
        }
        if config.mask_truncated:
            samples = without_weight(samples, truncated_rollouts(learned, target))
        average = None
        if "sdpo" in {loss.type for loss in config.losses}:
            feedback = config.feedback or Feedback()
            samples, own = await with_feedback(training, samples, learned, feedback, trains)
            metrics, average = metrics | own, feedback.rate if feedback.rate < 1 else None
        if self._learns(samples):
            metrics |= await self._update(training, samples, average)
        await training.finish_step(collected, metrics)

    def _learns(self, samples: Sequence[TrainingSample]) -> bool:
        """Whether an update has anything to learn: not where all advantages are 0 and no loss does without them."""
        if any(loss.trains_zero_advantage for loss in self.config.losses):
            return bool(samples)
        return any(advantages.any() for sample in samples for advantages in sample.advantages)

    def _filtered(self, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """The groups to learn from, and how many were left out."""
        if self.config.keep_groups == 1:
            return list(trajectories), {}
        groups = group_trajectories(trajectories)
        kept = most_uncertain(groups, self.config.keep_groups)
        return [each for group in kept for each in group], {"groups_filtered": float(len(groups) - len(kept))}

    async def _update(self, training: Training, samples: Sequence[TrainingSample], average: float | None) -> Metrics:
        config = self.config
        needed = needed_columns(config.losses, config.mismatch, config.proximal)
        models = {REF_LOGPROBS: config.reference, TEACHER_LOGPROBS: config.teacher}
        samples = await with_columns(training, samples, needed, models, lambda each: self._learns([each]))
        options = UpdateOptions(config.loss, config.minibatches, config.mismatch, average)
        return await training.update(samples, options)

    async def _collect(
        self, training: Training, target: str | None
    ) -> tuple[Collected, tuple[Trajectory, ...], dict[str, float]]:
        """The rollouts of a step, the earlier ones that join their groups, and what became of groups in which all had
        the same reward."""
        config, counts = self.config, Counter[str]()

        check = partial(self.rejections, target_agent=target)
        collect = partial(
            training.collect,
            group_size=config.group_size,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            check=check,
            timeout_reward=config.timeout_reward,
        )

        async def replay(new: Collected, joined: tuple[Trajectory, ...] = ()) -> tuple[Trajectory, ...]:
            if self._replay is None:
                return ()
            found, own = await self._replay.for_groups(training, new.trajectories, check, joined)
            counts.update(own)
            return (*joined, *found)

        collected = await collect(tasks=config.tasks_per_step)
        replayed, resampled = await replay(collected), 0
        for _ in range(config.dynamic_sampling):
            missing = config.tasks_per_step - groups_with_spread((*collected.trajectories, *replayed))
            if missing <= 0:
                break
            more = await collect(tasks=missing)
            replayed = await replay(more, replayed)
            collected, resampled = collected + more, resampled + missing
        if config.dynamic_sampling:
            counts["groups_resampled"] = resampled
        if self._replay is not None:
            self._replay.add(collected.trajectories)
            counts[SIZE] = self._replay.size
        return collected, replayed, {name: float(count) for name, count in counts.items()}

    async def _shaped(
        self, training: Training, trajectories: Sequence[Trajectory], target: str | None
    ) -> tuple[Sequence[Trajectory], dict[str, float]]:
        """The trajectories with the rewards that they are learned from."""
        trajectories, metrics = shape_rewards(trajectories, self.config, target)
        if (coefficient := self.config.kl_in_reward) and trajectories:
            reference = self.config.reference
            trajectories, own = await with_kl_penalty(training, trajectories, coefficient, reference, target)
            metrics |= own
        return trajectories, metrics

    def rejections(self, trajectories: Sequence[Trajectory], target_agent: str | None = None) -> list[Rejection]:
        """The rollouts that it cannot learn from: all of them if they hold no call of the policy, or none of the agents
        to train."""
        found = rejections(trajectories, self._credit.assignment, target_agent=target_agent)
        rejected = {each.rollout_id for each in found}
        left = [trajectory for trajectory in trajectories if trajectory.rollout_id not in rejected]
        return [*found, *without_any_call(left, target_agent)]
