"""The columns that losses need and samples lack: log-probabilities under a reference, a teacher, or the weights that an
update starts from. They are computed here, in one place, whichever loss reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agentlightning.algorithms.training import Learner, Training
from agentlightning.errors import ConfigError
from agentlightning.policy.losses import (
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    TEACHER_LOGPROBS,
    TokenLoss,
)
from agentlightning.policy.mismatch import Mismatch, Proximal, as_tuple, is_off
from agentlightning.trajectory import FloatArray, TokenTree, TrainingSample

COMPUTED: Final = frozenset({REF_LOGPROBS, TEACHER_LOGPROBS, PROXIMAL_LOGPROBS})


@dataclass(frozen=True, slots=True)
class Models:
    """The models beside the policy: named as in `PolicyConfig.model`, for the policy's own tokens."""

    reference: str | None = None
    """None: the weights that the run started from."""
    teacher: str | None = None

    async def of(self, column: str, training: Training) -> Path | None:
        """The model that a column is computed with; None: the policy itself."""
        if column == REF_LOGPROBS:
            return await training.starting_weights() if self.reference is None else Path(self.reference)
        if column == TEACHER_LOGPROBS:
            if self.teacher is None:
                raise ConfigError("there is no teacher to learn from; set teacher=DIRECTORY of a model")
            return Path(self.teacher)
        return None


def needed_columns(
    losses: Sequence[TokenLoss], mismatch: Mismatch | None, proximal: Proximal | None = None
) -> frozenset[str]:
    """The columns that an update needs and that are computed here."""
    found = frozenset[str]().union(*(loss.needs for loss in losses)) & COMPUTED
    corrects = proximal == "pass" or (mismatch is not None and not is_off(as_tuple(mismatch)))
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
    if column == PROXIMAL_LOGPROBS:
        return await _present_logprobs(learner, trees, adapters or [None] * len(trees))
    model = await models.of(column, training)
    return (await learner.score(trees, {"ref_logprobs"}, reference=model))["ref_logprobs"]


async def _present_logprobs(
    learner: Learner, trees: Sequence[TokenTree], adapters: Sequence[str | None]
) -> list[tuple[FloatArray, ...]]:
    """Of each tree under the adapter that it trains; None: the policy itself. The weights of an adapter are used for
    all of its trees together."""
    found: dict[int, tuple[FloatArray, ...]] = {}
    for adapter in dict.fromkeys(adapters):
        places = [i for i, own in enumerate(adapters) if own == adapter]
        scored = await learner.score([trees[i] for i in places], {"logprobs"}, adapter=adapter)
        found.update(zip(places, scored["logprobs"], strict=True))
    return [found[i] for i in range(len(trees))]


def learner_of(training: Training) -> Learner:
    """The weights of a run. Raises ConfigError where it trains none."""
    if training.learner is None:
        raise ConfigError("this run trains no model, so there are no log-probabilities to compare with")
    return training.learner
