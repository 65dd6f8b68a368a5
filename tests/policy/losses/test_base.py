"""Losses are found by name, alone or several at once."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import ConfigError
from agentlightning.policy.losses import LOSSES, GSPOLoss, Loss, NLLLoss, PPOLoss, token_losses


def test_losses_are_found_by_name_or_configuration() -> None:
    assert token_losses("ppo") == (PPOLoss(clip_low=0.2, clip_high=0.28),)
    assert token_losses({"type": "ppo", "dual_clip": 3}) == (PPOLoss(dual_clip=3),)
    assert token_losses(NLLLoss()) == (NLLLoss(),)
    assert token_losses(MappingProxyType({"type": "nll"})) == (NLLLoss(),)
    with pytest.raises(ConfigError, match=r"did you mean 'ppo'\? Known: awr, cispo, distill, dpo, dppo, entropy, gspo"):
        token_losses("pppo")
    for wrong in ({"type": "ppo", "clip": 0.1}, {"type": "ppo", "clip_low": 2.0}):
        with pytest.raises(ConfigError, match="cannot be used"):
            token_losses(wrong)


def test_several_losses_are_a_list() -> None:
    found = token_losses(["gspo", {"type": "nll", "coefficient": 0.1}, PPOLoss()])
    assert found == (GSPOLoss(), NLLLoss(coefficient=0.1), PPOLoss())
    with pytest.raises(ConfigError, match="trains nothing"):
        token_losses([])


def test_a_setting_is_a_loss_a_name_or_a_list_of_them() -> None:
    setting: TypeAdapter[Any] = TypeAdapter(Loss)
    assert setting.validate_python("gspo") == GSPOLoss()
    assert setting.validate_python({"type": "ppo", "clip_low": 0.1}) == PPOLoss(clip_low=0.1)
    several = setting.validate_python([{"type": "ppo"}, "nll"])
    assert several == (PPOLoss(), NLLLoss())
    assert setting.validate_python(setting.dump_python(several, mode="json")) == several
    for wrong in ({"type": "ppo", "clip": 1}, [], "pppo", [{"type": "ppo", "clip": 1}]):
        with pytest.raises(ValidationError):
            setting.validate_python(wrong)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_that_reads_advantages_leaves_out_what_has_none(name: str) -> None:
    (loss,) = token_losses(name)
    imitates = name == "awr"  # an average answer has the weight 1
    assert loss.trains_zero_advantage == (imitates or "advantages" not in loss.needs)
