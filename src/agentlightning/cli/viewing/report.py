"""`agl report`: what a run changed, as text or as one web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.opening import run_or_newest
from agentlightning.cli.options import GivenStore, Run
from agentlightning.cli.output import Result, agl


async def report(
    run: Run = None,
    html: Annotated[bool, typer.Option("--html", help="Write a page with curves, which needs no server.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="File to write (default: RUN/report.html; text is printed).", show_default=False)
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Changed tasks to show with their conversations.")] = 3,
    store: GivenStore = None,
) -> Result:
    """Report what a run changed: held-out reward with its interval, tasks won and lost, cost, examples.

    \b
    Examples:
      agl report
      agl report runs/first --html --out first.html
    """
    run = run_or_newest(run)
    text = await _report(run, html, examples, store)
    path = out or (run / "report.html" if html else None)
    if path is not None:
        path.write_text(text, encoding="utf-8")
    record = {"run": str(run), "file": None if path is None else str(path), **({} if path else {"text": text})}
    shown = text if path is None else f"wrote {path}"
    return Result(record, lambda console: console.print(shown), [agl("dashboard", run)])


async def _report(run: Path, html: bool, examples: int, store: str | None) -> str:
    from agentlightning.cli.store import open_named
    from agentlightning.dashboard.data.run_files import open_run
    from agentlightning.dashboard.report_page import report_page
    from agentlightning.training.report.result import markdown_report

    open_run(run)
    make = report_page if html else markdown_report
    if store is None:
        return await make(run, examples)
    async with open_named(store) as opened:
        return await make(run, examples, opened)
