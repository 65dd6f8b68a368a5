"""The page on losses lists what there is."""

from __future__ import annotations

from pathlib import Path

from agentlightning.algorithms.lightning_rl import PRESETS
from agentlightning.policy.losses import LOSSES
from agentlightning.policy.mismatch import CORRECTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "losses.md").read_text()


def test_every_loss_preset_and_correction_is_on_the_page() -> None:
    for name in {*LOSSES, *PRESETS, *CORRECTIONS}:
        assert f"\n| `{name}` |" in PAGE, name
