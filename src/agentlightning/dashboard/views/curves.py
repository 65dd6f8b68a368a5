"""The curves of a run: which metrics share a chart, and their values by step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from agentlightning.util.json_values import Json

T = TypeVar("T")
MOST_POINTS: Final = 2000
"""Steps that are sent; of more, the last of each interval."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Metrics that are drawn together."""

    name: str
    title: str
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of a metric -> its label."""
    others: str = ""
    """All metrics whose whole names match this pattern belong to it, too; the group is the label."""
    unit: str = ""
    band: tuple[str, str] | None = None
    """(metric, its spread): a band of metric - spread to metric + spread."""
    log: bool = False


CHARTS: Final = (
    Chart("reward", "Reward of the step", {"reward": "mean"}, band=("reward", "reward_std")),
    Chart("validation", "Validation reward", {}, others="validation_(.+)"),
    Chart("dimensions", "Reward by dimension", {}, others="(?:reward_of|air)_(.+)"),
    Chart("entropy", "Entropy", {"entropy": "of the trained tokens", "sampling_entropy": "as sampled"}, unit="nats"),
    Chart(
        "kl",
        "Divergence",
        {"approx_kl": "sampled from trained", "ref_kl": "from the reference", "mismatch_kl": "sampler and trainer"},
        unit="nats a token",
    ),
    Chart("gradient", "Gradient norm", {"grad_norm": "before clipping"}, log=True),
    Chart("clip", "Clipped tokens", {"clip_fraction": "share"}),
    Chart("length", "Response length", {"response_tokens": "tokens of a rollout"}, unit="tokens"),
    Chart("truncated", "Truncated, repeated", {"truncated": "truncated calls", "repeated_ngrams": "repeated n-grams"}),
    Chart("staleness", "Staleness", {"staleness": "mean", "staleness_max": "highest"}, unit="updates"),
    Chart(
        "groups",
        "Groups without spread",
        {
            "groups_without_spread": "all",
            "groups_failed": "all failed",
            "groups_solved": "all solved",
            "groups_repeated": "repeated outputs",
            "groups_certain": "certain outputs",
            "groups_constant": "constant reward",
        },
        unit="groups",
    ),
    Chart(
        "failures",
        "Rollouts not learned from",
        {"failed": "failed", "timeouts": "timed out"},
        others="rejected_(.+)",
        unit="rollouts",
    ),
    Chart("seconds", "Seconds by phase", {}, others="(.+)_seconds", unit="s"),
    Chart("speed", "Sampling speed", {"tokens_per_second": "tokens a second"}, unit="tokens/s"),
    Chart("loss", "Loss", {"loss": "loss"}),
    Chart("lr", "Learning rate", {"lr": "learning rate"}),
    Chart("guard", "Reward guard", {}, others="guard_(.+)"),
)
HIDDEN: Final = frozenset({"step", "revision"})


def charts_of(metrics: Sequence[Mapping[str, Any]]) -> Json:
    """The charts that have a number, whether it is the same at all steps, and the metrics that are in none of them."""
    rows = thinned(metrics)
    names = list(dict.fromkeys(name for row in metrics for name, value in row.items() if number_of(value) is not None))
    used: set[str] = set(HIDDEN)
    found: list[Json] = []
    for chart in CHARTS:
        series = [_series(rows, name, label) for name, label in _metrics_of(chart, names).items()]
        known = [[value for value in each["values"] if value is not None] for each in series]
        if any(known):
            used.update(each["metric"] for each in series)
            if chart.band is not None:
                used.add(chart.band[1])
            constant = any(len(own) > 1 for own in known) and all(len(set(own)) < 2 for own in known)
            found.append({**_chart(chart, series, rows), "constant": constant})
    others = [name for name in names if name not in used]
    return {
        "steps": [row.get("step") for row in rows],
        "charts": found,
        "others": [_series(rows, name, name.replace("_", " ")) for name in others],
        "thinned": len(metrics) - len(rows),
    }


def _chart(chart: Chart, series: list[Json], rows: Sequence[Mapping[str, Any]]) -> Json:
    band = None
    if chart.band is not None:
        metric, spread = chart.band
        pairs = [(number_of(row.get(metric)), number_of(row.get(spread))) for row in rows]
        if any(width is not None for _, width in pairs):
            band = {
                "metric": metric,
                "label": "± standard deviation within a group",
                "low": [None if m is None or w is None else m - w for m, w in pairs],
                "high": [None if m is None or w is None else m + w for m, w in pairs],
            }
    return {
        "name": chart.name,
        "title": chart.title,
        "unit": chart.unit,
        "log": chart.log,
        "series": series,
        "band": band,
    }


def _metrics_of(chart: Chart, names: Iterable[str]) -> dict[str, str]:
    found = {name: label for name, label in chart.metrics.items() if name in names}
    for name in names:
        if (matched := re.fullmatch(chart.others, name)) is not None:
            found[name] = matched[1].replace("_", " ")
    return found


def _series(rows: Sequence[Mapping[str, Any]], name: str, label: str) -> Json:
    return {"metric": name, "label": label, "values": [number_of(row.get(name)) for row in rows]}


def number_of(value: Any) -> float | None:
    """A value as a number; None for what is none."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def thinned(steps: Sequence[T]) -> list[T]:
    """At most MOST_POINTS of them, the last one included."""
    stride = max(1, math.ceil(len(steps) / MOST_POINTS))
    return [*steps[len(steps) - 1 :: -stride]][::-1]
