"""Promises about the picture of a run."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from agentlightning.errors import MissingExtraError
from agentlightning.evaluation.intervals import paired_gain
from agentlightning.training.tracking import COLORS, TRAINING, draw_curve, running_mean

pytestmark = pytest.mark.integration

METRICS = [
    {"step": step, "reward": step / 20, "loss": 1.0} | ({"validation_greedy": step / 18} if step % 5 == 0 else {})
    for step in range(1, 21)
]
GAINS = {"greedy": paired_gain([0.0] * 8, [1.0] * 6 + [0.0] * 2), "sampled": paired_gain([0.25] * 8, [0.5] * 8)}


def pixels(path: Path, color: str) -> int:
    """How many pixels are about of this color."""
    wanted = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return int((np.abs(imread(path)[..., :3] - wanted).max(axis=-1) < 0.02).sum())


def test_training_validation_and_held_out_reward_are_drawn(tmp_path: Path) -> None:
    whole, bare = tmp_path / "new" / "curve.png", tmp_path / "bare.png"
    draw_curve(METRICS, GAINS, whole)
    draw_curve([{"step": record["step"], "reward": record["reward"]} for record in METRICS], {}, bare)
    assert whole.read_bytes().startswith(b"\x89PNG")
    assert pixels(whole, TRAINING) > 500
    assert pixels(bare, TRAINING) > 500
    for color in COLORS.values():
        assert pixels(whole, color) > 500
        assert pixels(bare, color) == 0


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 1, "reward": 0.5}],
        [{"step": 1, "reward": None}, {"step": 2}, {"step": 3, "reward": math.nan}],
        [{"step": step, "reward": -50.0 + step, "validation_other": 3.0} for step in range(1, 9)],
    ],
)
def test_any_run_can_be_drawn(tmp_path: Path, metrics: list[dict[str, float | None]]) -> None:
    draw_curve(metrics, {}, tmp_path / "curve.png")
    assert imread(tmp_path / "curve.png").shape[1] > 1000


def test_the_running_mean_leaves_gaps_out() -> None:
    assert running_mean([1.0, 3.0, math.nan, 5.0], 2)[:2] == [1.0, 2.0]
    assert running_mean([1.0, 3.0, math.nan, 5.0], 2)[2:] == [3.0, 5.0]
    assert math.isnan(running_mean([math.nan], 3)[0])


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentlightning\[train\]'"):
        draw_curve(METRICS, GAINS, tmp_path / "curve.png")


def test_importing_it_does_not_import_matplotlib_and_drawing_does_not_choose_a_backend(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from agentlightning.training.tracking import draw_curve\n"
        "assert 'matplotlib' not in sys.modules\n"
        "draw_curve([], {}, Path(sys.argv[1]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "curve.png")], check=True, timeout=100)
