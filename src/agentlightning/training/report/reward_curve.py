"""The reward curve of a run as a PNG. Needs matplotlib (the extra `train`) and no display."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import MissingExtraError
from agentlightning.evaluation.intervals import Gain

COLORS = {"greedy": "#c2410c", "sampled": "#0f766e"}
OTHER_COLORS = ("#7c3aed", "#b45309", "#475569")
TRAINING = "#2563eb"
INK = "#334155"
VALIDATION = "validation_"
"""The prefix of a mode in a record of metrics."""


def draw_curve(metrics: Sequence[Mapping[str, Any]], gains: Mapping[str, Gain], path: Path) -> None:
    """Write a PNG: training reward of each step with its running mean, validation, held-out reward before and after.

    `metrics`: a record for each step with `step`, `reward`, and `validation_<mode>` if it was measured; a reward that
    is absent, None or NaN leaves a gap. `gains`: by mode. Raises MissingExtraError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "train") from error
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training(axes, metrics)
    modes = _modes(metrics, gains)
    for mode, color in modes.items():
        _draw_validation(axes, metrics, mode, color)
        if mode in gains:
            _draw_held_out(axes, mode, gains[mode], color)
    _style(axes, metrics, gains)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values up to each value, without gaps (NaN)."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def _modes(metrics: Sequence[Mapping[str, Any]], gains: Mapping[str, Gain]) -> dict[str, str]:
    validated = [name.removeprefix(VALIDATION) for record in metrics for name in record if name.startswith(VALIDATION)]
    names = list(dict.fromkeys([*gains, *validated]))
    spare = iter(OTHER_COLORS * len(names))
    return {name: COLORS.get(name) or next(spare) for name in names}


def _series(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    values = [record.get(name) for record in metrics]
    return [float(record["step"]) for record in metrics], [math.nan if value is None else value for value in values]


def _draw_training(axes: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    steps, rewards = _series(metrics, "reward")
    if all(map(math.isnan, rewards)):
        return
    window = max(3, round(len(steps) / 10))
    axes.plot(
        steps, rewards, color=TRAINING, alpha=0.3, linewidth=1.2, marker="o", markersize=2.5, label="training batch"
    )
    axes.plot(steps, running_mean(rewards, window), color=TRAINING, linewidth=2.4, label=f"mean of {window} batches")


def _draw_validation(axes: Any, metrics: Sequence[Mapping[str, Any]], mode: str, color: str) -> None:
    steps, rewards = _series(metrics, VALIDATION + mode)
    points = [(step, reward) for step, reward in zip(steps, rewards, strict=True) if not math.isnan(reward)]
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(
            x, y, color=color, linewidth=1, linestyle=":", marker="D", markersize=6, markeredgecolor="white",
            label=f"validation, {mode}", zorder=4,
        )  # fmt: skip


def _draw_held_out(axes: Any, mode: str, gain: Gain, color: str) -> None:
    for reward, style, word in ((gain.before, (0, (2, 3)), "before"), (gain.after, (0, (7, 3)), "after")):
        axes.axhline(
            reward,
            color=color,
            linewidth=1.5,
            linestyle=style,
            label=f"held out, {mode}, {word}: {reward:.3f}",
            zorder=1,
        )


def _style(axes: Any, metrics: Sequence[Mapping[str, Any]], gains: Mapping[str, Gain]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("training step", color=INK)
    axes.set_ylabel("mean reward", color=INK)
    axes.set_title(_title(gains), loc="left", color=INK, fontsize=11, fontweight="bold", pad=12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, max([1.0, *_series(metrics, "step")[0]]) * 1.02)
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.1:
        axes.set_ylim(-0.04, 1.04)
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#94a3b8")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, labelcolor=INK)


def _title(gains: Mapping[str, Gain]) -> str:
    if not gains:
        return "Reward during training"
    parts = [f"{mode} {gain.before:.2f} \N{RIGHTWARDS ARROW} {gain.after:.2f}" for mode, gain in gains.items()]
    return "Held-out reward: " + ",  ".join(parts)


# -- live curve ------------------------------------------------------------------------------------------------------

# The reward curve of a run that is not over: drawn again every half minute, in a thread.

logger = logging.getLogger(__name__)

SECONDS: Final = 30.0
"""The least time between two drawings; drawing one takes less than one."""


class LiveCurve:
    """Draws the curve while the run goes on. Without matplotlib it draws nothing; what fails is logged once."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._drawn = clock()
        self._thread: threading.Thread | None = None
        self._works = find_spec("matplotlib") is not None

    def draw(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Draw the steps that `read` returns, unless this was done a moment ago."""
        now = self._clock()
        busy = self._thread is not None and self._thread.is_alive()
        if not self._works or busy or now - self._drawn < SECONDS:
            return
        self._drawn = now
        self._thread = threading.Thread(target=self._draw, args=(read(),), name="curve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a drawing to end, and begin no other."""
        self._works = False
        if self._thread is not None:
            self._thread.join()

    def _draw(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        beside = self._path.with_name(f".{self._path.name}")
        try:
            draw_curve(metrics, {}, beside)
            beside.replace(self._path)
        except Exception as error:  # noqa: BLE001  A picture must not end a run.
            self._works = False
            logger.warning("%s is not drawn while the run goes on: %s: %s", self._path, type(error).__name__, error)
