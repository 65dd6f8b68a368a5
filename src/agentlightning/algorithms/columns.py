"""What a step asks of the policy before it learns: the columns that losses need and samples lack (log-probabilities
under a reference, a teacher, or the weights that an update starts from), and those that a credit rule reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from agentlightning.algorithms.training import Training
from agentlightning.assemble import shared_calls, token_tree
from agentlightning.credit import (
    Aggregate,
    Assignment,
    CreditContext,
    CreditMemory,
    CreditReport,
    CreditRule,
    group_trajectories,
    training_samples,
)
from agentlightning.credit.base import CallColumns, answering, by_call
from agentlightning.credit.rules import ANSWER_LOGPROBS, InformationGainCredit
from agentlightning.credit.training_samples import RETURNS, VALUES, Trains
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.base import ScoreColumn
from agentlightning.policy.learner import Learner
from agentlightning.policy.losses import (
    INTERPOLATION,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    TEACHER_LOGPROBS,
    TokenLoss,
)
from agentlightning.policy.mismatch import Mismatch, Proximal, as_tuple, interpolations, is_off
from agentlightning.trajectory import CallId, FloatArray, TokenTree, TrainingSample, Trajectory

COMPUTED: Final = frozenset({REF_LOGPROBS, TEACHER_LOGPROBS, PROXIMAL_LOGPROBS})


class Models(NamedTuple):
    """The models beside the policy: named as in `PolicyConfig.model`, for the policy's own tokens."""

    reference: str | None = None
    """None: the weights that the run started from."""
    teacher: str | None = None


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
    models: Models,
    learns: Callable[[TrainingSample], bool],
) -> list[TrainingSample]:
    """The samples with the columns they lack; those that nothing is learned from need no proximal policy."""
    found = list(samples)
    for column in sorted(needed):
        lacking = [
            i
            for i, sample in enumerate(found)
            if column not in sample.columns and (column != PROXIMAL_LOGPROBS or learns(sample))
        ]
        if lacking:
            trees, adapters = [found[i].tree for i in lacking], [found[i].adapter for i in lacking]
            for i, values in zip(lacking, await scores(training, trees, column, models, adapters), strict=True):
                found[i] = replace(found[i], columns={**found[i].columns, column: values})
    return found


async def scores(
    training: Training,
    trees: Sequence[TokenTree],
    column: str,
    models: Models,
    adapters: Sequence[str | None] = (),
) -> Sequence[tuple[FloatArray, ...]]:
    """A column of each tree; `adapters` are those that the trees train, by default the policy itself."""
    learner = learner_of(training)
    if column == INTERPOLATION:
        return [interpolations(tree, learner.policy_version, learner.updates_of) for tree in trees]
    if column == PROXIMAL_LOGPROBS:
        return await scores_by_adapter(learner, trees, "logprobs", adapters or [None] * len(trees))
    name = models.reference if column == REF_LOGPROBS else models.teacher
    if name is None and column != REF_LOGPROBS:
        raise ConfigError("there is no teacher to learn from; set teacher=DIRECTORY of a model")
    model = await training.starting_weights() if name is None else Path(name)
    return (await learner.score(trees, {"ref_logprobs"}, reference=model))["ref_logprobs"]


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
        self,
        training: Training,
        trajectories: Sequence[Trajectory],
        target_agent: str | None,
        trains: Trains | None = None,
    ) -> tuple[list[TrainingSample], CreditReport]:
        """The samples of one step, and what became of its groups. `trains` says what each call trains."""
        groups = group_trajectories(trajectories)
        columns = await self._columns(training, groups)
        return await asyncio.to_thread(
            training_samples,
            groups,
            self.assignment,
            aggregate=self.aggregate,
            target_agent=target_agent,
            trains=trains,
            context=CreditContext(self.memory, columns),
        )

    async def _columns(self, training: Training, groups: Sequence[Sequence[Trajectory]]) -> CallColumns:
        rule = self.assignment.rule
        wanted = rule.needs | (rule.uses if self.trains_values else frozenset())
        if not wanted or not any(each.transitions for group in groups for each in group):
            return {}
        if training.learner is None:
            raise ConfigError(f'credit rule "{rule.type}" needs {sorted(wanted)} of a policy, and this run trains none')
        found: dict[str, Mapping[CallId, Any]] = {}
        for name in sorted(wanted):
            if name == ANSWER_LOGPROBS and isinstance(rule, InformationGainCredit):
                trees = await asyncio.to_thread(_answer_trees, rule, groups, training.learner)
                found[name] = by_call(trees, await _score(training.learner, trees, "logprobs", rule.type))
            else:
                trees = await asyncio.to_thread(lambda: [token_tree(group) for group in groups])
                column = await _score(training.learner, trees, cast("ScoreColumn", name), rule.type)
                found[name] = with_shared(by_call(trees, column), groups)
        return found


def with_shared(found: Mapping[CallId, Any], groups: Sequence[Sequence[Trajectory]]) -> Mapping[CallId, Any]:
    """The numbers of each call, those of calls that repeat a recorded answer too."""
    shared = {call: first for group in groups for call, first in shared_calls(group).items()}
    return {**found, **{call: found[first] for call, first in shared.items() if first in found}}


async def _score(learner: Learner, trees: Sequence[TokenTree], column: ScoreColumn, rule: str) -> Any:
    try:
        return (await learner.score(trees, {column}))[column]
    except PolicyError as error:
        raise ConfigError(f'credit rule "{rule}" needs the column {column!r} of the policy: {error}') from error


def _answer_trees(
    rule: InformationGainCredit, groups: Sequence[Sequence[Trajectory]], learner: Learner
) -> list[TokenTree]:
    """For each group, its prompts followed by the known answers."""
    found: list[TokenTree] = []
    for group in groups:
        answers = {each.rollout_id: learner.chat.encode(rule.answer_text(each)) for each in group}
        found.append(token_tree(answering(group, answers)))
    return found


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
