"""The report of a run as one page without a script: the text of `agl report`, its curves as drawings."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import cycle
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
    "polyline{fill:none;stroke-width:1.8;stroke-linecap:round}.band{fill:#1d4ed8;fill-opacity:.15}"
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
    steps = [float(row.get("step") or 0) for row in files.metrics()][-len(chart["series"][0]["values"]) :]
    band = chart["band"] or {"low": [], "high": []}
    lines = [each["values"] for each in chart["series"]]
    known = [value for values in (*lines, band["low"], band["high"]) for value in values if value is not None]
    first, width, low, height = steps[0], steps[-1] - steps[0] or 1, min(known), max(known) - min(known) or 1
    bottom = HEIGHT - BOTTOM

    def place(step: float, value: float) -> str:
        x, y = (step - first) / width, (low + height - value) / height
        return f"{LEFT + (WIDTH - LEFT - 8) * x:.1f},{8 + (bottom - 8) * y:.1f}"

    def points(values: Sequence[float | None]) -> list[str]:
        return [place(step, value) for step, value in zip(steps, values, strict=False) if value is not None]

    drawn = [f'<polygon points="{" ".join(points(band["high"]) + points(band["low"])[::-1])}" class="band"/>']
    drawn.append(f'<path d="M{LEFT} 8V{bottom}H{WIDTH - 8}" fill="none" stroke="#94a3b8"/>')
    for value in (low, low + height / 2, low + height):
        y = place(first, value).partition(",")[2]
        drawn.append(f'<text x="{LEFT - 5}" y="{y}" dy="4" text-anchor="end">{value:.3g}</text>')
    for x, step, anchor in ((LEFT, first, "start"), (WIDTH - 8, steps[-1], "end")):
        drawn.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {step:g}</text>')
    keys: list[str] = []
    for values, each, color in zip(lines, chart["series"], cycle(COLORS), strict=False):
        own = points(values)
        dots = " ".join(own * 2 if len(own) == 1 else own)  # one point is a line of no length
        drawn.append(f'<polyline points="{dots}" stroke="{color}"/>')
        box = f'<svg width="14" height="6"><rect width="14" height="4" fill="{color}"/></svg>'
        keys.append(f'<span class="key">{box} {html.escape(each["label"])}</span>')
    unit = f" ({chart['unit']})" if chart["unit"] else ""
    return (
        f"<figure><figcaption>{html.escape(chart['title'] + unit)}</figcaption>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'
        f"<div>{''.join(keys)}</div></figure>"
    )
