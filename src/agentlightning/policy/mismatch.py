"""Corrections of the difference between the sampler's probabilities and the trainer's.

Servers, kernels and older weights give a token another probability than the trainer does, and a policy gradient that
ignores it is biased. With rho_t = exp(proximal_logprob_t - sampled_logprob_t), the trainer's probability before the
update over the recorded one, a correction is a factor of the weight of each token:

    truncate         min(rho, cap)                        of the token, or of its rollout: rho_i = prod_t rho_t
    icepop           rho_t if low <= rho_t <= high, else 0
    geometric_mask   1 if low <= (prod_t rho_t)^(1/n) <= high, else 0         of the rollout
    sequence_mask    1 if low <= prod_t rho_t <= high, else 0                 of the rollout

Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; IcePop: Ring-1T, 2025, arXiv:2510.18855; masks of sequences: Liu et al. 2025, "When speed kills
stability". A rollout is the sequence: all tokens that the policy sampled in it, in however many calls. Needs NumPy, and
no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import Field, PositiveFloat

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.losses import LOG_RATIO_LIMIT, TokenLoss
from agentlightning.trajectory import FloatArray, TokenTree
from agentlightning.util.plugins import Registry
from agentlightning.util.settings import Chosen, OneOrSeveral, Part, ShareBelowOne, chosen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Groups: TypeAlias = NDArray[np.int64]
    """The rollout of each token, numbered from 0 [N]."""


class Correction(Part, ABC):
    """A factor for the weight of each token."""

    multiplies: ClassVar[bool] = False
    """Whether the ratio itself is a factor; a mask is 0 or 1."""
    of_rollout: ClassVar[bool] = False
    """Whether the factor of a token depends on the other tokens of its rollout."""

    @abstractmethod
    def factors(self, log_ratio: FloatArray, rollout: Groups) -> FloatArray:
        """The factor of each token [N] from its log rho, and the rollout it is of."""


class NoCorrection(Correction):
    """Leaves the weights as they are."""

    type: Literal["off"] = "off"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which correction this is."""

    def factors(self, log_ratio: FloatArray, rollout: Groups) -> FloatArray:
        return _bounded_exp(log_ratio * 0)


class Truncation(Correction):
    """Truncated importance sampling: the ratio, up to a cap."""

    type: Literal["truncate"] = "truncate"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which correction this is."""
    level: Literal["token", "sequence"] = "token"
    """token: the ratio of each token; sequence: the product over its rollout."""
    cap: PositiveFloat | None = None
    """The largest factor. None: 2 for tokens, 5 for sequences."""

    multiplies: ClassVar[bool] = True

    @property
    def of_rollout(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.level == "sequence"

    def factors(self, log_ratio: FloatArray, rollout: Groups) -> FloatArray:
        if self.level == "token":
            return _bounded_exp(log_ratio).clip(max=self.cap or 2.0)
        return _bounded_exp(_sums(log_ratio, rollout)[0]).clip(max=self.cap or 5.0)


class IcePop(Correction):
    """The ratio of each token, where it lies within bounds; tokens outside do not count."""

    type: Literal["icepop"] = "icepop"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which correction this is."""
    low: ShareBelowOne = 0.5
    """The smallest ratio that counts."""
    high: float = Field(default=2.0, gt=1)
    """The largest ratio that counts."""

    multiplies: ClassVar[bool] = True

    def factors(self, log_ratio: FloatArray, rollout: Groups) -> FloatArray:
        ratio = _bounded_exp(log_ratio)
        return ratio * _within(ratio, self.low, self.high)


class GeometricMask(Correction):
    """Masks rollouts whose mean ratio (geometric, over tokens) is out of bounds."""

    type: Literal["geometric_mask"] = "geometric_mask"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which correction this is."""
    low: ShareBelowOne = 0.99
    """The smallest mean ratio that counts."""
    high: float = Field(default=1.01, gt=1)
    """The largest mean ratio that counts."""

    of_rollout: ClassVar[bool] = True

    def factors(self, log_ratio: FloatArray, rollout: Groups) -> FloatArray:
        return _within(_bounded_exp(self._log_ratio(*_sums(log_ratio, rollout))), self.low, self.high)

    def _log_ratio(self, sums: Any, counts: Any) -> Any:
        return sums / counts


class SequenceMask(GeometricMask):
    """Masks rollouts the product of whose ratios is out of bounds."""

    type: Literal["sequence_mask"] = "sequence_mask"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which correction this is."""
    low: ShareBelowOne = 0.0
    """The smallest product that counts."""
    high: float = Field(default=3.0, gt=1)
    """The largest product that counts."""

    def _log_ratio(self, sums: Any, counts: Any) -> Any:
        return sums


CORRECTIONS = Registry("corrections", "correction", Correction)
"""By `type`."""
for each in (NoCorrection, Truncation, IcePop, GeometricMask, SequenceMask):
    CORRECTIONS.register(each)
DEFAULT: tuple[Correction, ...] = (Truncation(),)


Mismatch = OneOrSeveral[Annotated[Correction, Chosen(CORRECTIONS)]]
"""The setting `mismatch`: a correction, its name, or a list of them, which multiply."""

MismatchSetting = str | Mapping[str, Any] | Correction | Sequence[str | Mapping[str, Any] | Correction]


def corrections(setting: MismatchSetting) -> tuple[Correction, ...]:
    """The corrections of a setting. Raises ConfigError."""
    several = tuple(chosen(each, CORRECTIONS) for each in as_tuple(setting))
    if not several:
        raise ConfigError("mismatch=[] corrects nothing; name one, or leave it out")
    if sum(each.multiplies for each in several) > 1:
        names = " and ".join(f'"{each.type}"' for each in several if each.multiplies)
        raise ConfigError(f"mismatch={names} count the same ratio twice; use one of them, and masks beside it")
    return several


def as_tuple(setting: Any) -> tuple[Any, ...]:
    return tuple(cast("Sequence[Any]", setting)) if isinstance(setting, list | tuple) else (setting,)


def is_off(several: Sequence[Correction]) -> bool:
    """Whether nothing is corrected."""
    return all(isinstance(each, NoCorrection) for each in several)


def check_combination(setting: MismatchSetting, losses: Sequence[TokenLoss]) -> tuple[Correction, ...]:
    """The corrections of a setting. Raises ConfigError where none of the losses uses them."""
    several = corrections(setting)
    if not is_off(several) and not any(loss.decoupled for loss in losses):
        names = ", ".join(f'"{loss.type}"' for loss in losses)
        raise ConfigError(f"mismatch corrects the ratios of other losses than {names}; leave it out, or use ppo")
    return several


def factors(log_ratio: FloatArray, rollout: Groups, several: Sequence[Correction]) -> FloatArray:
    """The product of all corrections [N]."""
    product = several[0].factors(log_ratio, rollout)
    for each in several[1:]:
        product = product * each.factors(log_ratio, rollout)
    return product


def measures(log_ratio: FloatArray, product: FloatArray) -> dict[str, FloatArray]:
    """Of each token [N] whose weight is corrected: mismatch_ratio, mismatch_kl (k3 of KL(sampler || trainer)),
    mismatch_weight (the factor), mismatch_masked (whether it is 0), proximal_differs (whether its proximal
    log-probability is another than the recorded one)."""
    ratio = _bounded_exp(log_ratio)
    return {
        "mismatch_ratio": ratio,
        "mismatch_kl": ratio - 1 - log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
        "mismatch_weight": product,
        "mismatch_masked": product == 0,
        "proximal_differs": log_ratio != 0,
    }


def _bounded_exp(values: Any) -> Any:
    import numpy as np

    return np.exp(np.clip(values, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _within(ratio: Any, low: float, high: float) -> Any:
    return ((ratio >= low) & (ratio <= high)).astype(ratio.dtype)


def _sums(values: Any, group: Groups) -> tuple[Any, Any]:
    """For each entry, the sum over its group and the size of the group [N]."""
    import numpy as np

    return np.bincount(group, values)[group], np.bincount(group)[group]


# -- proximal --------------------------------------------------------------------------------------------------------

# The proximal policy of losses with a ratio: what the ratio of a token is against, and is clipped around.
#
# Decoupled PPO (Hilton et al. 2022, "Batch size-invariance for policy optimization", arXiv:2110.00641, section 3) takes
# the ratio against a policy that is near the one being trained, and weighs a token by what lies between it and the
# policy that sampled the token, so that older rollouts are neither clipped for their age nor biased:
#
#     behavior      prox = sampled                           the ratio is against the recorded log-probabilities
#     pass          prox = log p under the weights that the update starts from, by one forward pass
#     interpolate   prox = sampled + a (logprob - sampled),   a = (v_prox - v_sampled) / (v_theta - v_sampled)
#
# The weight is exp(prox - sampled), corrected as `policy.mismatch` says. Interpolation (Fu et al. 2025, AReaL,
# arXiv:2505.24298, and its log-linear approximation) needs no pass: v_theta is the version that the update makes,
# v_prox = v_theta - 1 the one that it starts from, v_sampled that of the token, and no gradient flows through prox. A
# token of the present version has a = 0. Needs no torch.

Proximal = Literal["behavior", "pass", "interpolate"]
"""The setting `proximal`."""


def check_proximal(proximal: Proximal | None, losses: Sequence[TokenLoss], mismatch: MismatchSetting | None) -> None:
    """Raises ConfigError for a proximal policy that no loss uses, or that contradicts `mismatch`."""
    several = () if mismatch is None else corrections(mismatch)
    if proximal == "behavior" and not is_off(several):
        raise ConfigError(
            'proximal="behavior" computes no log-probabilities for mismatch to compare with; use proximal="pass", or '
            "leave mismatch out"
        )
    if proximal not in ("pass", "interpolate"):
        return
    if not any(loss.decoupled for loss in losses):
        names = ", ".join(f'"{loss.type}"' for loss in losses)
        raise ConfigError(f'proximal="{proximal}" is used by none of the losses {names}; leave it out, or use ppo')
    if proximal == "interpolate":
        check_token_level(several)


def check_token_level(several: Sequence[Correction]) -> None:
    """Raises ConfigError for corrections of whole rollouts, whose tokens are not all known in a micro-batch."""
    for each in several:
        if each.of_rollout:
            raise ConfigError(
                f'proximal="interpolate" is known in the forward pass only, where mismatch "{each.type}" over whole '
                'rollouts cannot be computed; use proximal="pass", or truncate (level="token") or icepop'
            )


def interpolations(tree: TokenTree, version: int, updates_of: Callable[[int], int] = int) -> tuple[FloatArray, ...]:
    """For each node, `a` of its tokens, where the update starts from weights of this version; empty for prompts.
    `updates_of` counts the updates behind a version, which resumes raise too.

    Raises PolicyError for a token whose version is not recorded."""
    import numpy as np

    found: list[FloatArray] = []
    for node in tree.nodes:
        if node.sampled and node.policy_version is None:
            raise PolicyError(
                f"call {node.call} of rollout {node.rollout_id} has no policy_version to interpolate from; use "
                'proximal="pass"'
            )
        age = max(0, updates_of(version) - updates_of(node.policy_version or 0)) if node.sampled else 0
        found.append(np.full(len(node.token_ids) if node.sampled else 0, age / (age + 1), np.float32))
    return tuple(found)
