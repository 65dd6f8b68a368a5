"""The reward curve of a run as a PNG. Needs matplotlib (the extra `train`) and no display."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.errors import MissingExtraError
from agentlightning.evaluation.intervals import Gain
from agentlightning.training.callbacks import Callback, FinishedStep, NoState
from agentlightning.training.health.step_record import VALIDATION
from agentlightning.training.persistence.run_dir import RunDir

if TYPE_CHECKING:
    from agentlightning.training.report.result import TrainingResult

COLORS = {"greedy": "#c2410c", "sampled": "#0f766e"}
TRAINING = "#2563eb"
INK = "#334155"


def draw_curve(metrics: Sequence[Mapping[str, Any]], gains: Mapping[str, Gain], path: Path) -> None:
    """Write a PNG: training reward of each step with its running mean, validation, held-out reward before and after.

    `metrics`: a record for each step with `step`, `reward`, and `validation_<mode>` if it was measured; a reward that
    is absent, None or NaN leaves a gap. `gains`: by mode. Raises MissingExtraError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "train") from error
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes: Any = figure.add_subplot()
    steps, rewards = [float(record["step"]) for record in metrics], _series(metrics, "reward")
    if not all(map(math.isnan, rewards)):
        window = max(3, round(len(steps) / 10))
        axes.plot(steps, rewards, ".-", color=TRAINING, alpha=0.3, label="training batch")
        axes.plot(steps, running_mean(rewards, window), color=TRAINING, label=f"mean of {window} batches")
    validated = [name.removeprefix(VALIDATION) for record in metrics for name in record if name.startswith(VALIDATION)]
    for mode in dict.fromkeys([*gains, *validated]):
        color, values = COLORS.get(mode, INK), _series(metrics, VALIDATION + mode)
        known = [(step, value) for step, value in zip(steps, values, strict=True) if value == value]
        if known:
            axes.plot(*zip(*known, strict=True), "D:", color=color, label=f"validation, {mode}")
        if (gain := gains.get(mode)) is not None:
            for reward, style, when in ((gain.before, ":", "before"), (gain.after, "--", "after")):
                label = f"held out, {mode}, {when}: {reward:.3f}"
                axes.axhline(reward, color=color, linestyle=style, label=label, zorder=1)
    held_out = [f"{mode} {gain.before:.2f} \N{RIGHTWARDS ARROW} {gain.after:.2f}" for mode, gain in gains.items()]
    title = "Held-out reward: " + ",  ".join(held_out) if held_out else "Reward during training"
    axes.set_title(title, loc="left", color=INK)
    axes.set(xlabel="training step", ylabel="mean reward", xlim=(0, max([1.0, *steps]) * 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.1:
        axes.set_ylim(-0.04, 1.04)
    axes.grid(axis="y", alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values up to each value, without gaps (NaN)."""
    parts = ([each for each in values[max(0, end - window) : end] if each == each] for end in range(1, len(values) + 1))
    return [sum(known) / len(known) if known else math.nan for known in parts]


def _series(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = [record.get(name) for record in metrics]
    return [math.nan if value is None else value for value in values]


# -- live curve ------------------------------------------------------------------------------------------------------

# The reward curve of a run that is not over: drawn again every half minute, in a thread.

logger = logging.getLogger(__name__)

SECONDS = 30.0
"""The least time between two drawings; drawing one takes less than one."""


class Curve(Callback[NoState]):
    """Draws the curve while the run goes on, and at its end. Without matplotlib it draws nothing in between; what fails
    there is logged once."""

    name = "curve"

    def __init__(self, run_dir: RunDir, *, required: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`required`: a run that ends without matplotlib is an error; else it has no curve."""
        self._run_dir, self._path, self._clock = run_dir, run_dir.path / "curve.png", clock
        self._works = find_spec("matplotlib") is not None
        self._required = required or self._works
        self._drawn = clock()
        self._thread: threading.Thread | None = None

    async def on_step_end(self, step: FinishedStep) -> None:
        """Draw the steps so far, unless this was done a moment ago."""
        now, busy = self._clock(), self._thread is not None and self._thread.is_alive()
        if self._works and not busy and now - self._drawn >= SECONDS:
            self._drawn = now
            self._thread = threading.Thread(target=self._draw, args=[self._run_dir.read_metrics()], daemon=True)
            self._thread.start()

    async def on_end(self, result: TrainingResult) -> TrainingResult:
        await self.close()
        if self._required:
            gains = {mode: gain for mode, gain in result.held_out.items() if gain.tasks}
            draw_curve(self._run_dir.read_metrics(), gains, self._path)
        return replace(result, curve=self._path if self._path.exists() else None)

    async def close(self) -> None:
        """Wait for a drawing to end, and begin no other."""
        self._works = False
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _draw(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        beside = self._path.with_name(f".{self._path.name}")
        try:
            draw_curve(metrics, {}, beside)
            beside.replace(self._path)
        except Exception as error:  # noqa: BLE001  A picture must not end a run.
            self._works = False
            logger.warning("%s is not drawn while the run goes on: %s: %s", self._path, type(error).__name__, error)
