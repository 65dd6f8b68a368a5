"""The switch interval of the process is short while a policy samples, and what it was when none does any more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.models import tiny_checkpoint

from agentlightning.engine.local import worker
from agentlightning.engine.local.worker import SWITCH_SECONDS, SwitchInterval
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.open import open_policy


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


async def test_a_policy_that_is_closed_leaves_the_interval_as_it_was(
    tmp_path: Path, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SWITCH_INTERVAL", SwitchInterval())  # counts no policies of other tests
    config = LocalPolicyConfig(model=tiny_checkpoint(tmp_path), device="cpu")
    one, two = await open_policy(config), await open_policy(config)
    await one.save(tmp_path / "one")  # its thread is there
    await two.save(tmp_path / "two")
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    await one.close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    await two.close()
    assert sys.getswitchinterval() == interval


def test_an_interval_set_by_others_is_kept(interval: float) -> None:
    switching = SwitchInterval()
    with switching.short():
        sys.setswitchinterval(0.001)
    assert sys.getswitchinterval() == pytest.approx(0.001)
    sys.setswitchinterval(0.0001)
    shorter = sys.getswitchinterval()
    with switching.short():
        assert sys.getswitchinterval() == shorter
    assert sys.getswitchinterval() == shorter
