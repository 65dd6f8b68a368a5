"""Token-level losses, one file each, found by the `type` in their settings. Importing them imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, ValidationError

from agentlightning.errors import ConfigError
from agentlightning.policy.losses.awr import AWRLoss as AWRLoss
from agentlightning.policy.losses.base import LOSSES as LOSSES
from agentlightning.policy.losses.base import LossValue as LossValue
from agentlightning.policy.losses.base import TokenBatch as TokenBatch
from agentlightning.policy.losses.base import TokenLoss as TokenLoss
from agentlightning.policy.losses.base import register as register
from agentlightning.policy.losses.cispo import CISPOLoss as CISPOLoss
from agentlightning.policy.losses.dppo import DPPOLoss as DPPOLoss
from agentlightning.policy.losses.entropy import EntropyLoss as EntropyLoss
from agentlightning.policy.losses.gspo import GSPOLoss as GSPOLoss
from agentlightning.policy.losses.importance import ImportanceLoss as ImportanceLoss
from agentlightning.policy.losses.nll import NLLLoss as NLLLoss
from agentlightning.policy.losses.ppo import PPOLoss as PPOLoss
from agentlightning.policy.losses.preference.base import PreferenceLoss as PreferenceLoss
from agentlightning.policy.losses.preference.dpo import DPOLoss as DPOLoss
from agentlightning.policy.losses.preference.ipo import IPOLoss as IPOLoss
from agentlightning.policy.losses.preference.kto import KTOLoss as KTOLoss
from agentlightning.policy.losses.preference.simpo import SimPOLoss as SimPOLoss
from agentlightning.policy.losses.reference.distill import DistillLoss as DistillLoss
from agentlightning.policy.losses.reference.kl import KLLoss as KLLoss
from agentlightning.policy.losses.reference.sdpo import SDPOLoss as SDPOLoss
from agentlightning.policy.losses.sapo import SAPOLoss as SAPOLoss
from agentlightning.policy.losses.turn import TurnLoss as TurnLoss
from agentlightning.policy.losses.value import ValueLoss as ValueLoss
from agentlightning.util.settings import by_type, one_or_several

if TYPE_CHECKING:
    OneLoss: TypeAlias = TokenLoss
    Loss: TypeAlias = TokenLoss | tuple[TokenLoss, ...]
else:
    OneLoss = Annotated[Union[tuple(LOSSES.values())], Field(discriminator="type"), BeforeValidator(by_type)]  # noqa: UP007
    Loss = Annotated[
        Annotated[OneLoss, Tag("one")] | Annotated[tuple[OneLoss, ...], Field(min_length=1), Tag("several")],
        Discriminator(one_or_several),
    ]
"""The setting `loss`: a loss, its name, or a list of them, which add up."""

LossSetting: TypeAlias = str | Mapping[str, Any] | TokenLoss | Sequence[str | Mapping[str, Any] | TokenLoss]

_adapter: TypeAdapter[TokenLoss] = TypeAdapter(OneLoss)


def token_losses(setting: LossSetting) -> tuple[TokenLoss, ...]:
    """The losses of a setting: names ("ppo"), tables with a `type`, losses, or a list of these. Raises ConfigError."""
    given = [setting] if isinstance(setting, str | Mapping | TokenLoss) else list(setting)
    if not given:
        raise ConfigError("loss=[] trains nothing; name at least one")
    return tuple(_token_loss(each) for each in given)


def _token_loss(setting: str | Mapping[str, Any] | TokenLoss) -> TokenLoss:
    if isinstance(setting, TokenLoss):
        return setting
    try:
        return _adapter.validate_python(setting)
    except ValidationError as error:
        known = ", ".join(sorted(LOSSES))
        raise ConfigError(f"loss {setting!r} cannot be used: {error}; known types: {known}") from error
