"""The report of a run as one page without a script: the text of `agl report`, its curves as drawings."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agentlightning.dashboard.data.run_files import RunFiles, open_run
from agentlightning.dashboard.views.curves import charts_of
from agentlightning.dashboard.views.runs import held_out, warnings_of
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.report.result import as_html, markdown_report

WIDTH, HEIGHT, LEFT, BOTTOM = 420, 190, 52, 22
COLORS: Final = ("#1d4ed8", "#c2410c", "#0f766e", "#7e22ce", "#a16207", "#be185d", "#475569", "#15803d")
STYLE: Final = (
    "figure{display:inline-block;margin:.5rem;max-width:100%}figcaption{font-weight:600}svg{max-width:100%;height:auto}"
    ".key{font-size:13px;margin-right:.8rem}text{font:11px system-ui,sans-serif;fill:#475569}"
)


async def report_page(run_dir: Path, examples: int, store: LightningStoreBase | None = None) -> str:
    """The page of a run, finished or not. Raises ConfigError where there is no run."""
    files = open_run(run_dir)
    if files.report() is None:
        text = as_html(f"# Report of {run_dir.name}\n\nThe run is not finished: there is no result yet.\n")
    else:
        text = as_html(await markdown_report(run_dir, examples, store))
    charts = [_figure(chart, files) for chart in charts_of(files.metrics())["charts"] if not chart["constant"]]
    parts = [_intervals(files), _warnings(files), "<h2>Curves</h2>", *charts]
    page = text.replace("</style>", f"{STYLE}</style>", 1)
    return page.replace("</body>", "\n".join(part for part in parts if part) + "\n</body>", 1)


def _warnings(files: RunFiles) -> str:
    items: list[str] = []
    for each in warnings_of(files, files.state()):
        since = f", since step {each['since']}" if each["since"] else ""
        name = html.escape(each["name"].replace("_", " "))
        items.append(f"<li><b>{name}</b>{since}: {html.escape(each['what'])}</li>")
    return f"<h2>Signs of trouble</h2><ul>{''.join(items)}</ul>" if items else ""


def _intervals(files: RunFiles) -> str:
    """Held-out reward before and after, each with its interval."""
    rows: list[str] = []
    for mode, found in held_out(files, files.state()).items():
        for when in ("before", "after"):
            if (measured := found[when]) is not None:
                numbers = f"{measured['mean']:.3f}</td><td>{measured['low']:.3f} to {measured['high']:.3f}"
                rows.append(f"<tr><td>{html.escape(mode)}, {when}</td><td>{numbers}</td></tr>")
    head = "<tr><td>held out</td><td>mean</td><td>95% interval</td></tr>"
    return f"<h2>Held-out reward</h2><table>{head}{''.join(rows)}</table>" if rows else ""


# -- drawings ----------------------------------------------------------------------------------------------------------


def _figure(chart: dict[str, Any], files: RunFiles) -> str:
    steps = [row.get("step") for row in files.metrics()][-len(chart["series"][0]["values"]) :]
    band = chart["band"]
    values = [v for each in chart["series"] for v in each["values"] if v is not None]
    values += [v for edge in ("low", "high") for v in (band or {}).get(edge, ()) if v is not None]
    if not values or len(steps) < 1:
        return ""
    low, high = min(values), max(values)
    scale = _Scale(float(steps[0] or 0), float(steps[-1] or 0), low, high)
    lines = [_line(steps, each["values"], scale, COLORS[i % len(COLORS)]) for i, each in enumerate(chart["series"])]
    keys = [
        f'<span class="key"><svg width="14" height="6"><rect width="14" height="4" fill="{COLORS[i % len(COLORS)]}"/>'
        f"</svg> {html.escape(each['label'])}</span>"
        for i, each in enumerate(chart["series"])
    ]
    unit = f" ({chart['unit']})" if chart["unit"] else ""
    return (
        f"<figure><figcaption>{html.escape(chart['title'] + unit)}</figcaption>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"{_axes(scale)}{_band(steps, band, scale)}{''.join(lines)}</svg><div>{''.join(keys)}</div></figure>"
    )


class _Scale:
    """Where a value is drawn."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self.first, self.last = first, last if last > first else first + 1
        self.low, self.high = low, high if high > low else low + 1

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return 8 + (HEIGHT - BOTTOM - 8) * (1 - (value - self.low) / (self.high - self.low))


def _axes(scale: _Scale) -> str:
    bottom = HEIGHT - BOTTOM
    parts = [f'<path d="M{LEFT} 8V{bottom}H{WIDTH - 8}" fill="none" stroke="#94a3b8"/>']
    for value in (scale.low, (scale.low + scale.high) / 2, scale.high):
        y = scale.y(value)
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for step, anchor in ((scale.first, "start"), (scale.last, "end")):
        parts.append(f'<text x="{scale.x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {step:g}</text>')
    return "".join(parts)


def _line(steps: Sequence[Any], values: Sequence[float | None], scale: _Scale, color: str) -> str:
    known = [(scale.x(float(s)), scale.y(v)) for s, v in zip(steps, values, strict=True) if v is not None]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in known)
    if len(known) == 1:
        return f'<circle cx="{known[0][0]:.1f}" cy="{known[0][1]:.1f}" r="3" fill="{color}"/>'
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>' if known else ""


def _band(steps: Sequence[Any], band: dict[str, Any] | None, scale: _Scale) -> str:
    if band is None:
        return ""
    rows = [
        (scale.x(float(s)), lo, hi)
        for s, lo, hi in zip(steps, band["low"], band["high"], strict=True)
        if lo is not None
    ]
    points = [f"{x:.1f},{scale.y(hi):.1f}" for x, _, hi in rows] + [
        f"{x:.1f},{scale.y(lo):.1f}" for x, lo, _ in rows[::-1]
    ]
    return f'<polygon points="{" ".join(points)}" fill="{COLORS[0]}" fill-opacity="0.15"/>'
