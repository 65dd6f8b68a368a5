"""Compares credit rules on recorded groups: how much of the gradient that each would give is signal. Trains nothing.

A rule gives every call c an advantage A_c. Without the model, its gradient is taken in log-linear models of what the
agents did, a weight for each pair of a context x and a token y, whose score is known from counts:

    g_k = sum over sampled tokens of group k   w_t A_t (e(x_t, y_t) - sum_y p(y | x_t) e(x_t, y)),   p from all groups

There are two contexts: the state of the call with the answer so far, which tells what to do where, and the agent with
the last two tokens, which tells what tasks have in common. Constant advantages give no gradient. With g over random
groups of random tasks,

    snr = |E g|^2 / tr Cov g          for one group;      rollouts to signal-to-noise 1 = rollouts of a group / snr

the gradient noise scale of McCandlish et al. 2018, arXiv:1812.06162, equation 2.8. Splitting the groups at random into
halves whose credit is computed separately, and multiplying gradients of different halves only, estimates |E g|^2
without bias, also where a rule pools groups; g is compressed by a count sketch (Charikar et al. 2002), which keeps
inner products. Intervals are percentiles of a bootstrap over groups. A high ratio is of use only where the rule points
where rewards do: `agreement` is the cosine of E g with that of plain group-relative returns.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from agentlightning.credit import CreditRule, is_target
from agentlightning.credit.base import CreditContext, credit_rule
from agentlightning.credit.rejection import Rejection, count_reasons, rejection
from agentlightning.errors import AgentLightningError, DatasetError, MissingRewardError, RewardError
from agentlightning.trajectory import Trajectory, Transition, scalar_reward
from agentlightning.util.frozen_struct import FrozenStruct, as_dataclass
from agentlightning.util.json_values import dumps, loads

# -- score features --------------------------------------------------------------------------------------------------

# The score of sampled tokens in log-linear models with counted probabilities, and gradients made of it.
#
# Two models with a weight for each pair of a context x and a token y: in one the context is the state of the call with
# the answer so far, in the other the agent with the last two tokens. With a factor f_t for each token, a group has
#
#     g = sum over tokens t   f_t (e(x_t, y_t) - sum_y p(y | x_t) e(x_t, y)),        p: the shares counted in all groups
#
# compressed to a few thousand numbers by a count sketch: a random place and sign for each weight.

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatMatrix: TypeAlias = NDArray[np.float64]
    IntVector: TypeAlias = NDArray[np.int64]
else:
    FloatMatrix = IntVector = Any

Groups: TypeAlias = Sequence[Sequence[Trajectory]]

SKETCH = 2048
"""Numbers of a compressed gradient."""
MOST_CONTEXTS = 16_384
"""Contexts that are used, the most frequent ones: their expectations are held in memory."""


class ScoreFeatures:
    """Every sampled token with the weights of the log-linear models that it bears on."""

    def __init__(self, groups: Groups, target_agent: str | None) -> None:
        self.calls: dict[tuple[int, str, str], slice] = {}
        """By group, rollout and span, the places of its tokens."""
        self.shares: list[float] = []
        """Of each token: 1 over the tokens of its rollout."""
        contexts: dict[Any, int] = {}
        pairs: dict[tuple[int, int], int] = {}
        entries: list[tuple[int, int, int, int]] = []
        for number, group in enumerate(groups):
            for trajectory in group:
                calls = [call for call in trajectory.transitions if is_target(call.agent, target_agent)]
                tokens = sum(len(call.response_token_ids) for call in calls)
                for call in calls:
                    start = len(self.shares)
                    for place, (token, keys) in enumerate(_contexts(call), start):
                        for key in keys:
                            context = contexts.setdefault(key, len(contexts))
                            entries.append((number, place, context, pairs.setdefault((context, token), len(pairs))))
                    self.shares += [1 / tokens] * len(call.response_token_ids)
                    self.calls[number, call.rollout_id, call.span_id] = slice(start, len(self.shares))
        self.groups = len(groups)
        self.rollouts_per_group = sum(map(len, groups)) / len(groups)
        if not entries:
            return
        import numpy as np

        rng = np.random.default_rng(0)
        group, token, context, pair = np.array(entries, np.int64).T
        of_pair = np.array([of for of, _ in pairs], np.int64)
        occurrences, actions = np.bincount(context), np.bincount(of_pair)
        used = np.argsort(-occurrences, kind="stable")
        used = used[actions[used] > 1][:MOST_CONTEXTS]
        row = np.full(len(actions), -1)
        row[used] = np.arange(len(used))
        bucket, sign = rng.integers(0, SKETCH, len(pairs)), rng.choice((-1.0, 1.0), len(pairs))
        share = np.bincount(pair) / occurrences[of_pair]
        of_used = row[of_pair] >= 0
        self._expected = np.zeros((len(used), SKETCH))
        """Of each context, the expectation of e(x, y)."""
        np.add.at(self._expected, (row[of_pair[of_used]], bucket[of_used]), (share * sign)[of_used])
        kept = row[context] >= 0
        self._group, self._token, self._context = group[kept], token[kept], row[context[kept]]
        self._bucket, self._sign = bucket[pair[kept]], sign[pair[kept]]

    def gradients(self, factors: FloatMatrix) -> FloatMatrix:
        """g of each group [groups, SKETCH], for a factor of each token."""
        own = factors[self._token]
        totals = self._sums(self._context, own, len(self._expected))
        return self._sums(self._bucket, own * self._sign, SKETCH) - totals @ self._expected

    def _sums(self, places: IntVector, numbers: FloatMatrix, width: int) -> Any:
        """Of each group, at each of `width` places [groups, width]."""
        import numpy as np

        return np.bincount(self._group * width + places, numbers, self.groups * width).reshape(self.groups, width)


def _contexts(call: Transition) -> Iterator[tuple[int, tuple[Hashable, Hashable]]]:
    """Each token with its two contexts."""
    answered, last = hash((call.agent, call.state)), (-1, -1, *call.prompt_token_ids[-2:])[-2:]
    for token in call.response_token_ids:
        yield token, (answered, (call.agent, *last))
        answered, last = hash((answered, token)), (last[1], token)


SPLITS = 4
"""Random halvings of the groups."""
BOOTSTRAPS = 400
BATCH = 16
"""Groups whose credit a rule assigns together, as in a step of training."""
REFERENCE = {"type": "group_relative", "intermediate": "ignore"}
MIN_GROUPS = 4
"""Fewer cannot be halved with two groups on each side."""

Interval: TypeAlias = tuple[float, float]
NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RuleSignal:
    """The signal of one rule's advantages."""

    rule: str
    snr: float
    """Signal-to-noise ratio of the gradient of one group. At most 0 where no signal was found."""
    interval: Interval
    """95% interval of `snr`."""
    rollouts: float
    """Rollouts to a signal-to-noise ratio of 1; infinite where no signal was found."""
    rollouts_interval: Interval
    agreement: float | None
    """Cosine with the gradient of `group_relative`; None where either has no signal."""
    groups_used: int
    """Groups that teach something under this rule."""


@as_dataclass
class CreditComparison(FrozenStruct, frozen=True):
    """What `compare_credit` found."""

    signals: tuple[RuleSignal, ...]
    """Of the rules that can use the data, the highest ratio first."""
    unusable: Mapping[str, str]
    """The other rules, each with the reason."""
    groups: int
    rollouts: int
    left_out: Mapping[str, int] = {}
    """Rollouts and groups that were not used, by reason."""

    def as_json(self) -> dict[str, Any]:
        """The comparison as JSON values; infinite numbers are null."""
        table = asdict(self)
        return loads(dumps({"rules": table.pop("signals"), **table}))


def compare_credit(
    groups: Groups,
    rules: Iterable[str | Mapping[str, Any] | CreditRule],
    *,
    target_agent: str | None = None,
    left_out: Mapping[str, int] = NOTHING,
) -> CreditComparison:
    """Compare rules on groups of rollouts of one task each.

    Rollouts without a reward, and groups that then have fewer than two, are left out and counted, together with those
    of `left_out`. A rule that cannot use the data is listed with its reason. Raises DatasetError where too little is
    left to compare anything."""
    usable, found_out = _usable(groups)
    left_out = {**left_out, **found_out}
    if len(usable) < MIN_GROUPS:
        counted = "".join(f", {count} {reason.replace('_', ' ')}" for reason, count in left_out.items())
        raise DatasetError(
            f"{len(usable)} of {len(groups)} groups have two rollouts or more with a reward{counted}; comparing credit"
            f" rules needs at least {MIN_GROUPS} such groups: record several rollouts of the same task, each with a"
            " reward"
        )
    features = ScoreFeatures(usable, target_agent)
    if not features.shares:
        agents = sorted({call.agent or "" for group in usable for each in group for call in each.transitions})
        raise DatasetError(f"no call of an agent called {target_agent!r} has known tokens; there are {agents}")
    sampler = _Sampler(len(usable))
    reference = _halves(credit_rule(REFERENCE), usable, features, sampler)
    found: list[RuleSignal] = []
    unusable: dict[str, str] = {}
    for setting in rules:
        name = _name(setting)
        try:
            halves = _halves(credit_rule(setting), usable, features, sampler)
        except AgentLightningError as error:
            unusable[name] = str(error)
            continue
        if not halves[1]:
            unusable[name] = "every group has the same reward in all its rollouts, or no step that it could tell apart"
            continue
        found.append(_signal(name, halves, reference, sampler, features))
    found.sort(key=lambda each: -each.snr)
    rollouts = sum(map(len, usable))
    return CreditComparison(tuple(found), unusable, len(usable), rollouts, left_out)


def _name(setting: str | Mapping[str, Any] | CreditRule) -> str:
    if isinstance(setting, str):
        return setting
    return setting.type if isinstance(setting, CreditRule) else str(setting.get("type"))


# -- data ------------------------------------------------------------------------------------------------------------


def _usable(groups: Groups) -> tuple[list[list[Trajectory]], dict[str, int]]:
    """Groups of two rollouts or more with rewards that are one number each, and what was left out by reason."""
    scored: list[list[Trajectory]] = []
    refused: list[Rejection] = []
    for group in groups:
        scored.append([])
        for each in group:
            try:
                if (reward := each.score) is None:
                    raise MissingRewardError("it has no reward")
                transitions = tuple(
                    call if call.reward is None else replace(call, reward=scalar_reward(call.reward, each.weights))
                    for call in each.transitions
                )
                scored[-1].append(replace(each, reward=reward, transitions=transitions))
            except RewardError as error:
                refused.append(rejection(each.rollout_id, error))
    alone = sum(len(group) == 1 for group in scored)
    left_out = count_reasons(refused) | ({"groups_of_one": alone} if alone else {})
    return [group for group in scored if len(group) > 1], left_out


# -- estimates -------------------------------------------------------------------------------------------------------


class _Sampler:
    """The random halves and bootstrap samples, the same for every rule."""

    def __init__(self, groups: int) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        self.sides = [rng.permutation(groups) < groups // 2 for _ in range(SPLITS)]
        self.across = np.zeros((groups, groups))
        for side in self.sides:
            self.across += side[:, None] != side[None, :]
        self.counts = rng.multinomial(groups, [1 / groups] * groups, BOOTSTRAPS).astype(float)
        self.whole = np.ones((1, groups))

    def products(self, left: Sequence[FloatMatrix], right: Sequence[FloatMatrix]) -> FloatMatrix:
        """Inner products of the gradients of groups in different halves, summed over the splits."""
        pairs = zip(self.sides, left, right, strict=True)
        return sum((a @ b.T) * (side[:, None] != side[None, :]) for side, a, b in pairs)  # pyright: ignore[reportReturnType]

    def mean_product(self, products: FloatMatrix, counts: FloatMatrix) -> FloatMatrix:
        """The mean product, for each row of counts of groups."""
        return ((counts @ products) * counts).sum(1) / ((counts @ self.across) * counts).sum(1)


Halves: TypeAlias = tuple[list[FloatMatrix], int]
"""The gradients under one rule, [groups, SKETCH] for each split, and the number of groups that have one."""


def _halves(rule: CreditRule, groups: Groups, features: ScoreFeatures, sampler: _Sampler) -> Halves:
    """The credit of either half of each split is assigned in batches as a run would have them, with its own memory."""
    import numpy as np

    found: list[FloatMatrix] = []
    used = set[int]()
    for side in sampler.sides:
        factors = np.zeros(len(features.shares))
        for half in (False, True):
            context = CreditContext()
            large = [i for i, group in enumerate(groups) if bool(side[i]) is half and len(group) >= rule.min_group]
            for start in range(0, len(large), BATCH):
                numbers = large[start : start + BATCH]
                batch = [groups[i] for i in numbers]
                for trajectory in chain.from_iterable(batch):
                    rule.check(trajectory)
                for number, group, credit in zip(numbers, batch, rule.assign(batch, context), strict=True):
                    if credit is None:
                        continue
                    used.add(number)
                    for call, advantage, weight, _ in credit.of_calls(group):
                        tokens = features.calls.get((number, call.rollout_id, call.span_id))
                        if tokens is not None:
                            factors[tokens] = advantage * weight
        found.append(features.gradients(factors * features.shares))
    return found, len(used)


def _signal(name: str, own: Halves, reference: Halves, sampler: _Sampler, features: ScoreFeatures) -> RuleSignal:
    import numpy as np

    (gradients, used), (theirs, _) = own, reference
    products = sampler.products(gradients, gradients)
    sizes = sum((each**2).sum(1) for each in gradients) / SPLITS

    def ratio(counts: FloatMatrix) -> FloatMatrix:
        signal = sampler.mean_product(products, counts)
        noise = (counts @ sizes) / counts.sum(1) - signal
        return signal / np.maximum(noise, 1e-12 * np.maximum(signal, 1e-300))

    def mean(left: Sequence[FloatMatrix], right: Sequence[FloatMatrix]) -> float:
        return float(sampler.mean_product(sampler.products(left, right), sampler.whole)[0])

    snr = float(ratio(sampler.whole)[0])
    low, high = (float(each) for each in np.nanquantile(ratio(sampler.counts), (0.025, 0.975)))
    signal = mean(gradients, gradients)
    known, shared = mean(theirs, theirs), mean(gradients, theirs)
    rollouts = features.rollouts_per_group
    return RuleSignal(
        rule=name,
        snr=snr,
        interval=(low, high),
        rollouts=_rollouts(rollouts, snr),
        rollouts_interval=(_rollouts(rollouts, high), _rollouts(rollouts, low)),
        agreement=max(-1.0, min(1.0, shared / math.sqrt(signal * known))) if min(signal, known) > 0 else None,
        groups_used=used,
    )


def _rollouts(group_size: float, snr: float) -> float:
    return group_size / snr if snr > 0 else math.inf
