"""The losses of the Tinker API by their names there, as losses of this package and rows of what they need.

Losses are sums over all tokens; advantages contain whatever weight a token has. Their formulas are those of the API's
documentation (tinker-docs.thinkingmachines.ai/losses, November 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

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

_LOSSES: Final[Mapping[str, tuple[type[TokenLoss], Mapping[str, float]]]] = {
    "cross_entropy": (NLLLoss, {}),
    "importance_sampling": (ImportanceLoss, {}),
    "ppo": (PPOLoss, {LOW: 0.8, HIGH: 1.2}),
    "cispo": (CISPOLoss, {LOW: 0.0, HIGH: 4.0}),
    "gspo": (GSPOLoss, {LOW: 0.9997, HIGH: 1.0004}),
}
"""By name: the class, and the settings with their defaults."""


def make_loss(name: str, config: Mapping[str, float | str]) -> TokenLoss:
    """Raises ConfigError for a loss that is not offered here, and for a setting that it does not have."""
    if name not in _LOSSES:
        raise ConfigError(f"the loss {name!r} is not offered by this server; use one of {', '.join(_LOSSES)}")
    kind, defaults = _LOSSES[name]
    if unknown := sorted(config.keys() - defaults.keys()):
        raise ConfigError(
            f"the loss {name!r} has no setting {', '.join(unknown)} here; it has {', '.join(defaults) or 'none'}"
        )
    try:
        given = {key: float(value) for key, value in {**defaults, **config}.items()}
        if not given:
            return kind()
        low = None if name == "cispo" and given[LOW] == 0 else 1 - given[LOW]
        return kind.model_validate({"clip_low": low, "clip_high": given[HIGH] - 1})
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"the loss {name!r} cannot have {dict(config)}: {error}") from error


def columns_of(loss: str, tokens: int, inputs: Mapping[str, Any]) -> dict[str, FloatArray]:
    """What a loss needs of each token of a sequence, from its inputs [T]. Raises ConfigError for inputs that are
    missing, unknown, or not one number for each token."""
    needed = {"target_tokens", *(("weights",) if loss == "cross_entropy" else RL_INPUTS.values())}
    known = needed | ({MASK} if loss == "gspo" else set[str]())
    if missing := sorted(needed - inputs.keys()):
        raise ConfigError(f"the loss {loss!r} needs the inputs {', '.join(missing)} for each sequence")
    if unknown := sorted(inputs.keys() - known):
        raise ConfigError(f"the loss {loss!r} has no input {', '.join(unknown)}; leave it out")
    for name, values in inputs.items():
        if len(values) != tokens:
            raise ConfigError(f"the loss input {name!r} has {len(values)} numbers for {tokens} tokens; give one each")
    if not tokens:
        raise ConfigError("a sequence has no tokens; leave it out")
    if loss == "cross_entropy":
        columns = {WEIGHTS: inputs["weights"]}
    else:
        columns = {name: inputs[given] for name, given in RL_INPUTS.items()}
        columns[WEIGHTS] = inputs.get(MASK, inputs["advantages"]) != 0
    return {name: values.astype("f4") for name, values in columns.items()}
