"""The report of a run as one page without a script: the text of `agl report`, its curves as drawings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader

from agentlightning.dashboard.data.run_files import open_run
from agentlightning.dashboard.views.runs import charts_of, held_out, warnings_of
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.report.result import as_html, markdown_report
from agentlightning.util.json_values import Json

AXES: Final = {"width": 420, "height": 190, "left": 52, "right": 412, "bottom": 168}
"""Of a drawing, and of its axes."""
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
    state, lines = files.state(), files.metrics()
    template = Environment(
        loader=PackageLoader("agentlightning.dashboard", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template("report.html.jinja")
    content = template.render(
        held_out=held_out(files, state),
        warnings=warnings_of(files, state),
        charts=[_drawing(chart, lines) for chart in charts_of(lines)["charts"] if not chart["constant"]],
        **AXES,
    )
    return text.replace("</style>", f"{STYLE}</style>", 1).replace("</body>", f"{content}</body>", 1)


def _drawing(chart: Json, lines: Sequence[Json]) -> Json:
    """A chart in the coordinates of the page."""
    series, band = chart["series"], chart["band"] or {"low": [], "high": []}
    steps = [float(row.get("step") or 0) for row in lines][-len(series[0]["values"]) :]
    rows = (*(each["values"] for each in series), band["low"], band["high"])
    known = [value for values in rows for value in values if value is not None]
    first, width, low, height = steps[0], steps[-1] - steps[0] or 1, min(known), max(known) - min(known) or 1

    def y_of(value: float) -> str:
        return f"{8 + (AXES['bottom'] - 8) * (low + height - value) / height:.1f}"

    def points(values: Sequence[float | None]) -> list[str]:
        pairs, left, right = zip(steps, values, strict=False), AXES["left"], AXES["right"]
        return [f"{left + (right - left) * (x - first) / width:.1f},{y_of(y)}" for x, y in pairs if y is not None]

    return {
        "title": f"{chart['title']} ({chart['unit']})" if chart["unit"] else chart["title"],
        "band": points(band["high"]) + points(band["low"])[::-1],
        "heights": [(value, y_of(value)) for value in (low, low + height / 2, low + height)],
        "first": first,
        "last": steps[-1],
        "series": [
            {"label": each["label"], "color": color, "points": points(each["values"])}
            for each, color in zip(series, cycle(COLORS), strict=False)
        ],
    }
