"""The switch interval of a process that samples is short, or as short as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.models import tiny_checkpoint

from agentlightning.engine.local.worker import SWITCH_SECONDS
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.open import open_policy


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("before", "expected"), [(0.005, SWITCH_SECONDS), (0.0001, 0.0001)])
async def test_a_policy_makes_the_interval_short(tmp_path: Path, before: float, expected: float) -> None:
    sys.setswitchinterval(before)
    policy = await open_policy(LocalPolicyConfig(model=tiny_checkpoint(tmp_path), device="cpu"))
    await policy.save(tmp_path / "saved")  # its thread is there
    assert sys.getswitchinterval() == pytest.approx(expected)
    await policy.close()
