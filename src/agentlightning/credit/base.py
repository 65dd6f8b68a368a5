"""What a credit rule is, and the registry that finds one by its `type`.

A rule turns the rewards of a batch's groups into an advantage for each call, or each token of it. Rules are pure;
`agentlightning.credit.training_samples` puts what they return on token trees. A rule is a frozen configuration, a class
in any module (docs/guides/extend.md).
"""

from __future__ import annotations

import statistics
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import TypeAdapter

from agentlightning.errors import ConfigError, ResumeError, RewardError
from agentlightning.task import task_key
from agentlightning.trajectory import CallId, FloatArray, TokenTree, Trajectory, Transition
from agentlightning.util.plugins import Registry, calls_of
from agentlightning.util.settings import Part, chosen

# -- memory ----------------------------------------------------------------------------------------------------------

# What credit rules remember of tasks from one batch to the next: bounded, and plain enough for JSON.
#
# A rule keeps a table for each task: a list of numbers for each key, such as the moving mean of the return through a
# state. A run keeps one memory, writes it in its checkpoints and restores it when it resumes.

MemoryTable = dict[str, list[float]]
"""Numbers by key."""
_TABLES = TypeAdapter(dict[str, MemoryTable])


@dataclass(slots=True)
class CreditMemory:
    """Tables of numbers by task, the task that was written last at the end. Where it holds more than `limit` keys, the
    tasks that were not written for longest are forgotten.

    >>> memory = CreditMemory(limit=2)
    >>> for task in ("a", "b", "c"):
    ...     memory.write(task, {"state": [0.5, 8.0]})
    >>> memory.read("a"), memory.read("c")
    ({}, {'state': [0.5, 8.0]})
    """

    limit: int = 200_000
    """Keys of all tasks together."""
    _tables: dict[str, MemoryTable] = field(default_factory=dict[str, MemoryTable])
    _size: int = 0

    @property
    def size(self) -> int:
        """The number of keys of all tasks."""
        return self._size

    def read(self, task: str) -> Mapping[str, Sequence[float]]:
        """The table of a task; empty if there is none."""
        return self._tables.get(task, {})

    def write(self, task: str, table: Mapping[str, Sequence[float]]) -> None:
        """Replace the table of a task."""
        self._size += len(table) - len(self._tables.pop(task, {}))
        self._tables[task] = {key: list(numbers) for key, numbers in table.items()}
        while self._size > self.limit and len(self._tables) > 1:
            oldest = next(iter(self._tables))
            self._size -= len(self._tables.pop(oldest))

    def state_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {"tables": self._tables}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all of it. Raises ResumeError for what `state_dict` cannot have written."""
        try:
            tables = _TABLES.validate_python(state["tables"])
        except (KeyError, ValueError) as error:
            raise ResumeError(f"the memory of the credit rule cannot be read: {error!r}; start a new run") from error
        self._tables, self._size = {}, 0
        for task, table in tables.items():
            self.write(task, table)


def memory_key(group: Sequence[Trajectory]) -> str:
    """The same for every group of one task: a digest of the task, or the group's name where the task is not known."""
    if not group:
        return ""
    return group[0].group if group[0].task is None else task_key(group[0].task)


Group: TypeAlias = Sequence[Trajectory]
"""Rollouts of one task, each with a reward that is one number."""

PerCall: TypeAlias = Sequence[Sequence[Any]]
"""For each trajectory of a group, for each of its transitions: a number, or an array of one for each sampled token."""

Advantages = list[tuple[float, ...]]
"""`PerCall` with plain numbers."""

SMALLEST_SPREAD = 1e-9
"""Numbers closer than this, relative to their size, are equal: the difference is rounding."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The credit of one group."""

    advantages: PerCall
    """How much better than expected."""
    weights: PerCall | None = None
    """The factor of each token's share of the loss; None: 1 everywhere."""
    returns: PerCall | None = None
    """What a value head learns from each token; None: the rule says nothing about it."""
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the rule did, by name: added up over a batch and shown in the metrics of the step."""

    def of_calls(self, group: Group) -> Iterator[tuple[Transition, Any, Any, Any]]:
        """Each call of the group with its advantage, its weight and what a value head learns (None: nothing)."""
        for i, trajectory in enumerate(group):
            for k, call in enumerate(trajectory.transitions):
                weight = 1.0 if self.weights is None else self.weights[i][k]
                yield call, self.advantages[i][k], weight, None if self.returns is None else self.returns[i][k]


CallColumns: TypeAlias = Mapping[str, Mapping[CallId, Any]]
"""By name of the column, by (rollout_id, span_id) of a call, an array with one number for each sampled token."""


@dataclass(frozen=True, slots=True)
class CreditContext:
    """What a rule is given beside the groups of a batch."""

    memory: CreditMemory = field(default_factory=CreditMemory)
    """What rules remember from one batch to the next."""
    columns: CallColumns = field(default_factory=dict[str, Mapping[CallId, Any]])
    """The columns that the rule `needs` or `uses`, as the policy computed them."""

    def of_call(self, column: str, call: Transition) -> Any:
        """A column's array for one call. Raises ConfigError where the column was not computed."""
        found = self.columns.get(column, {}).get(call.call_id)
        if found is None and call.response_token_ids:
            raise ConfigError(
                f"this credit rule needs the column {column!r} of call {call.span_id} of rollout {call.rollout_id}, "
                "which was not computed"
            )
        return () if found is None else found


class CreditRule(Part, ABC):
    """Decides how much better than expected each call was. Subclasses define `advantages` for one group, or override
    `of_group` if the rule uses the `context`, or `assign` if groups of a batch depend on one another."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names that settings may have for it."""
    min_group: ClassVar[int] = 2
    """Smaller groups have no baseline under this rule."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Columns that the policy must compute before `assign`: `values`, `logprobs`, ..."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """Columns that improve it and that it does without where the policy has none."""
    gives_returns: ClassVar[bool] = False
    """Whether it says what a value head learns from each token, if it is given `values`."""

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        """The credit of each group of a batch; None where a group teaches nothing.

        Raises RewardError for a kind of reward the rule cannot use."""
        for trajectory in (each for group in groups for each in group):
            self.check(trajectory)
        return [self.of_group(group, context) if len(group) >= self.min_group else None for group in groups]

    def of_group(self, group: Group, context: CreditContext) -> Credit | None:
        """The credit of one group of `min_group` or more, for a rule that needs no other group."""
        found = self.advantages(group)
        return None if found is None else Credit(found)

    def advantages(self, group: Group) -> Advantages | None:
        """One number for each call of a group of `min_group` or more, which `check` accepts; None where it teaches
        nothing. Raises as `assign` does."""
        raise NotImplementedError(f"{type(self).__name__} defines neither `advantages` nor `assign`")

    def check(self, trajectory: Trajectory) -> None:
        """Raises RewardError where the rule cannot use the rewards of this rollout. By default it can."""

    def check_group_size(self, group_size: int) -> None:
        """Raises ConfigError where groups of this size can never be trained on."""
        if group_size < self.min_group:
            raise ConfigError(
                f'group_size={group_size} leaves no baseline; use at least {self.min_group} or credit="reinforce"'
            )


class OutcomeRule(CreditRule):
    """A rule that sees the final reward alone."""

    intermediate: Literal["refuse", "ignore"] = "refuse"
    """What to do with intermediate rewards, which this rule has no use for."""

    def check(self, trajectory: Trajectory) -> None:
        rewarded = next((call for call in trajectory.transitions if call.reward is not None), None)
        if self.intermediate == "refuse" and rewarded is not None:
            raise RewardError(
                f"call {rewarded.span_id} of rollout {trajectory.rollout_id} has an intermediate reward, which credit "
                f'rule "{self.type}" cannot use; emit one reward per rollout or set intermediate="ignore"'
            )


RULES = Registry("credit_rules", "credit rule", CreditRule)
"""By `type`, and by alias."""
register = RULES.register


def canonical_credit(setting: Any) -> Any:
    """The setting of a rule as a file can keep it: a name, or a table."""
    if isinstance(setting, CreditRule):
        rule: CreditRule = credit_rule(setting)
        return {"type": rule.type, **rule.model_dump(mode="json", exclude_unset=True)}
    return RULES.canonical(setting)


def credit_rule(rule: str | Mapping[str, Any] | CreditRule | type[CreditRule]) -> CreditRule:
    """The rule of a name, a table with `type`, or a class. Raises ConfigError for an unknown name or setting."""
    return chosen(rule, RULES)


def credited(rule: CreditRule, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
    """What a rule assigns. Raises ExtensionError, which names its file, for one of others that fails, or does not give
    each call of each group a finite number."""
    with calls_of(type(rule), "credit rule"):
        found = rule.assign(groups, context)
        for group, credit in zip(groups, found, strict=True):
            for part in () if credit is None else (credit.advantages, credit.weights, credit.returns):
                _check(part, group)
        return found


def _check(part: PerCall | None, group: Group) -> None:
    import numpy as np

    if part is None:
        return
    shape, expected = [len(own) for own in part], [len(each.transitions) for each in group]
    if shape != expected:
        raise ValueError(f"it credits {shape} calls of rollouts that made {expected}; give each call a number")
    for own, trajectory in zip(part, group, strict=True):
        if not all(np.isfinite(np.asarray(value, float)).all() for value in own):
            raise ValueError(f"it gives calls of rollout {trajectory.rollout_id} {list(own)!r:.80}, not finite numbers")


def final_rewards(group: Group) -> list[float]:
    """The final rewards of a group. Raises RewardError where one is missing or has named dimensions."""
    return [plain_reward(trajectory) for trajectory in group]


def plain_reward(trajectory: Trajectory) -> float:
    """The final reward. Raises RewardError where it is missing or has named dimensions."""
    if isinstance(trajectory.reward, int | float):
        return float(trajectory.reward)
    raise RewardError(f"rollout {trajectory.rollout_id} has reward {trajectory.reward!r}; credit needs one number")


def step_reward(call: Transition) -> float:
    """The intermediate reward after a call, 0.0 if there is none. Raises RewardError where it has named dimensions."""
    if isinstance(call.reward, dict):
        raise RewardError(f"call {call.span_id} has reward {call.reward!r}; credit needs one number")
    return 0.0 if call.reward is None else float(call.reward)


def discounted(numbers: Sequence[float], gamma: float, last: float = 0.0) -> list[float]:
    """s_k = numbers_k + gamma s_{k+1} of each, with `last` behind the last one."""
    found: list[float] = []
    for number in reversed(numbers):
        last = number + gamma * last
        found.append(last)
    return found[::-1]


def returns_to_go(trajectory: Trajectory, gamma: float = 1.0) -> list[float]:
    """G of each call, from the first to the last: the discounted rewards that follow it, the final one included."""
    final, rewards = plain_reward(trajectory), [step_reward(call) for call in trajectory.transitions]
    return discounted([*rewards[:-1], *(reward + final for reward in rewards[-1:])], gamma)


def standardised(numbers: Sequence[float], *, divide: bool = True) -> list[float] | None:
    """Distances from the mean, in population standard deviations if `divide`. None where all numbers are equal."""
    if not numbers or spread(numbers) <= SMALLEST_SPREAD:
        return None
    mean = statistics.fmean(numbers)
    scale = statistics.pstdev(numbers) if divide else 1.0
    return [(number - mean) / scale for number in numbers]


def standardised_calls(rows: Sequence[Sequence[float | None]], *, divide: bool = True) -> list[list[float]] | None:
    """`standardised`, of the numbers of the calls of all rollouts together; a call without one has 0.0."""
    found = standardised([number for own in rows for number in own if number is not None], divide=divide)
    if found is None:
        return None
    every = iter(found)
    return [[0.0 if number is None else next(every) for number in own] for own in rows]


def of_rollouts(numbers: Sequence[float], group: Group) -> Advantages:
    """Every call of a rollout has the rollout's number."""
    return [(number,) * len(each.transitions) for number, each in zip(numbers, group, strict=True)]


def spread(numbers: Sequence[float]) -> float:
    """How far numbers are apart, relative to their size."""
    return (max(numbers) - min(numbers)) / max(1.0, *map(abs, numbers))


# -- columns -----------------------------------------------------------------------------------------------------------

# Columns of token trees, call by call: what a policy computed, as credit rules read it.


def by_call(trees: Sequence[TokenTree], column: Sequence[tuple[FloatArray, ...]]) -> Mapping[CallId, FloatArray]:
    """By (rollout_id, span_id), the column's numbers for all tokens of the call, in their order."""
    import numpy as np

    parts: dict[CallId, list[FloatArray]] = {}
    for tree, arrays in zip(trees, column, strict=True):
        for node, array in zip(tree.nodes, arrays, strict=True):
            if node.sampled:
                parts.setdefault(node.call_id, []).append(array)
    return {call: np.concatenate(own) for call, own in parts.items()}


def by_node(tree: TokenTree, calls: Mapping[CallId, FloatArray]) -> list[FloatArray]:
    """The inverse of `by_call`: the numbers of each node's tokens, 0 for calls that have none."""
    import numpy as np

    found: list[FloatArray] = []
    done: dict[CallId, int] = {}
    for node in tree.nodes:
        length = len(node.token_ids) if node.sampled else 0
        call = node.call_id
        start = done.get(call, 0)
        done[call] = start + length
        found.append(calls[call][start : start + length] if length and call in calls else np.zeros(length, np.float32))
    return found


def answering(group: Group, answers: Mapping[str, Sequence[int]]) -> list[Trajectory]:
    """The same calls, each with the answer of its rollout (by rollout_id, token ids) in place of what was sampled."""
    return [
        replace(
            each,
            transitions=tuple(
                replace(
                    call,
                    response_token_ids=tuple(answers[each.rollout_id]),
                    logprobs=(0.0,) * len(answers[each.rollout_id]),
                    versions=(),
                    replays=None,
                    temperature=1.0,
                    kept_sets=None,
                )
                for call in each.transitions
            ),
        )
        for each in group
    ]


def monte_carlo_returns(returns: Sequence[Sequence[float]], group: Group) -> list[list[Any]]:
    """For a value head: every token of a call learns the return from the call on."""
    import numpy as np

    return [
        [np.full(len(call.response_token_ids), gain) for call, gain in zip(each.transitions, own, strict=True)]
        for each, own in zip(group, returns, strict=True)
    ]
