"""The losses of the Tinker API by their names there, as losses of this package and back, and what rows they need.

Losses are sums over all tokens; advantages contain whatever weight a token has. Their formulas are those of the API's
documentation (tinker-docs.thinkingmachines.ai/losses, November 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.policy.losses import (
    ADVANTAGES,
    SAMPLED_LOGPROBS,
    WEIGHTS,
    CISPOLoss,
    GSPOLoss,
    ImportanceLoss,
    NLLLoss,
    PPOLoss,
    TokenLoss,
)
from agentlightning.trajectory import FloatArray

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
MASK: Final = "sequence_ratio_mask"
RL_INPUTS: Final = {SAMPLED_LOGPROBS: "logprobs", ADVANTAGES: "advantages"}
"""Column -> the input of a sequence that it is."""

LOSSES: Final[Mapping[str, tuple[type[TokenLoss], Mapping[str, float]]]] = {
    "cross_entropy": (NLLLoss, {}),
    "importance_sampling": (ImportanceLoss, {}),
    "ppo": (PPOLoss, {LOW: 0.8, HIGH: 1.2}),
    "cispo": (CISPOLoss, {LOW: 0.0, HIGH: 4.0}),
    "gspo": (GSPOLoss, {LOW: 0.9997, HIGH: 1.0004}),
}
"""By name: the class, and the settings with their defaults."""
NATIVE: Final[Mapping[type[TokenLoss], str]] = {
    kind: name for name, (kind, _) in LOSSES.items() if kind is not GSPOLoss
}
"""What a policy lets its server compute, as its name there."""


def make_loss(name: str, config: Mapping[str, float | str]) -> TokenLoss:
    """Raises ConfigError for a loss that is not offered here, and for a setting that it does not have."""
    if name not in LOSSES:
        raise ConfigError(f"the loss {name!r} is not offered by this server; use one of {', '.join(LOSSES)}")
    kind, defaults = LOSSES[name]
    if unknown := sorted(config.keys() - defaults.keys()):
        raise ConfigError(
            f"the loss {name!r} has no setting {', '.join(unknown)} here; it has {', '.join(defaults) or 'none'}"
        )
    if not defaults:
        return kind()
    try:
        low, high = (float({**defaults, **config}[key]) for key in (LOW, HIGH))
        unclipped = kind is CISPOLoss and low == 0
        return kind.model_validate({"clip_low": None if unclipped else 1 - low, "clip_high": high - 1})
    except ValueError as error:
        raise ConfigError(f"the loss {name!r} cannot have {dict(config)}: {error}") from error


def native(loss: TokenLoss) -> tuple[str, Mapping[str, float]] | None:
    """The API's name for a loss, and its settings there; None for one that it lacks, as those are that a user has
    derived from one of its own."""
    name = NATIVE.get(type(loss))
    if name is None or loss.model_dump(exclude={"type", "coefficient", "clip_low", "clip_high"}, exclude_defaults=True):
        return None
    if not isinstance(loss, PPOLoss | CISPOLoss):
        return name, {}
    return name, {LOW: 0.0 if loss.clip_low is None else 1 - loss.clip_low, HIGH: 1 + loss.clip_high}


def columns_of(loss: str, tokens: int, inputs: Mapping[str, Any]) -> dict[str, FloatArray]:
    """What a loss needs of each token of a sequence, from its inputs [T]. Raises ConfigError for inputs that are
    missing, unknown, or not one number for each token."""
    needed = {"target_tokens", *(("weights",) if loss == "cross_entropy" else RL_INPUTS.values())}
    given = inputs.keys() - ({MASK} if loss == "gspo" else set[str]())
    if given != needed:
        names = [", ".join(sorted(each)) for each in (needed, given)]
        raise ConfigError(f"the loss {loss!r} needs the inputs {names[0]} for each sequence, and was given {names[1]}")
    for name, values in inputs.items():
        if len(values) != tokens:
            raise ConfigError(f"the loss input {name!r} has {len(values)} numbers for {tokens} tokens; give one each")
    if not tokens:
        raise ConfigError("a sequence has no tokens; leave it out")
    if loss == "cross_entropy":
        return {WEIGHTS: inputs["weights"].astype("f4")}
    columns = {name: inputs[given].astype("f4") for name, given in RL_INPUTS.items()}
    return {**columns, WEIGHTS: (inputs.get(MASK, inputs["advantages"]) != 0).astype("f4")}
