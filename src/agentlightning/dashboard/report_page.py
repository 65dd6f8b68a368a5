"""The report of a run as one page without a script: the text of `agl report`, its curves as drawings."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader

from agentlightning.dashboard.data.run_files import open_run
from agentlightning.dashboard.views.runs import charts_of, held_out, warnings_of
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.report.result import as_html, markdown_report

COLORS = ("#1d4ed8", "#c2410c", "#0f766e", "#7e22ce", "#a16207", "#be185d", "#475569", "#15803d")
STYLE = (
    "figure{display:inline-block;margin:.5rem;max-width:100%}figcaption{font-weight:600}"
    "figure>svg{max-width:100%;height:auto}"  # not a drawing within, whose height "auto" is all of the outer one
    "polyline{fill:none;stroke-width:1.8;stroke-linecap:round;vector-effect:non-scaling-stroke}.band{fill:#1d4ed8;fill-opacity:.15}"
    ".key{font-size:13px;margin-right:.8rem}text{font:11px system-ui,sans-serif;fill:#475569}"
)


async def report_page(run_dir: Path, examples: int, store: LightningStoreBase | None = None) -> str:
    """The page of a run, finished or not. Raises ConfigError where there is no run."""
    files = open_run(run_dir)
    markdown = f"# Report of {run_dir.name}\n\nThe run is not finished: there is no result yet.\n"
    if files.report() is not None:
        markdown = await markdown_report(run_dir, examples, store)
    state, curves = files.state(), charts_of(files.metrics())
    template = Environment(
        loader=PackageLoader("agentlightning.dashboard", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template("report.html.jinja")
    content = template.render(
        held_out=held_out(files, state),
        warnings=warnings_of(files, state),
        steps=[step or 0 for step in curves["steps"]],
        charts=[each for each in curves["charts"] if not each["constant"]],
        colors=COLORS,
    )
    return as_html(markdown).replace("</style>", f"{STYLE}</style>", 1).replace("</body>", f"{content}</body>", 1)
