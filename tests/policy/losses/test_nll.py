"""Supervised learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.policy.losses import NLLLoss


def test_nll_is_weighted_surprise(batch: Callable[..., Any]) -> None:
    value = NLLLoss()(batch([(-1.0, -9.0, 5.0, 0.25), (-3.0, -9.0, 0.0, 0.75)]))
    assert value.loss.item() == pytest.approx(0.25 + 2.25)
    assert value.sums["nll"].item() == 4.0
