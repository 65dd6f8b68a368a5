"""Several runs side by side: curves, settings that differ, tasks won and lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from agentlightning.dashboard.data.run_data import DashboardData
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.data.text import shortened
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.curves import charts_of
from agentlightning.dashboard.views.runs import summary
from agentlightning.errors import AgentLightningError, ConfigError, RewardError
from agentlightning.evaluation.comparison import compare_tasks
from agentlightning.task import task_key

MOST_RUNS: Final = 8
MOST_TASKS: Final = 100
"""Tasks that are listed as won, and as lost."""


async def compare(data: DashboardData, query: Query) -> dict[str, Any]:
    """`runs=A,B,...`: each is compared with the first."""
    names = list(dict.fromkeys(query.names("runs")))
    if not 2 <= len(names) <= MOST_RUNS:
        raise ConfigError(f"runs={','.join(names)!r} names {len(names)} runs; name 2 to {MOST_RUNS}, as runs=A,B")
    sources = [data.catalog.source(name) for name in names]
    files = [each.run() for each in sources]
    return await asyncio.to_thread(_compare, names, files) | {
        "summaries": [await asyncio.to_thread(summary, each) for each in sources]
    }


def _compare(names: Sequence[str], files: Sequence[RunFiles]) -> dict[str, Any]:
    return {
        "runs": list(names),
        "curves": {name: charts_of(each.metrics()) for name, each in zip(names, files, strict=True)},
        "settings": _differences(names, files),
        "tasks": [_tasks(names[0], files[0], name, each) for name, each in zip(names[1:], files[1:], strict=True)],
    }


def _differences(names: Sequence[str], files: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Settings whose values differ, by name."""
    settings = [each.settings() for each in files]
    found: list[dict[str, Any]] = []
    for setting in sorted({name for each in settings for name in each}):
        values = [each.get(setting) for each in settings]
        if any(value != values[0] for value in values):
            found.append({"setting": setting, "values": dict(zip(names, values, strict=True))})
    return found


def _tasks(first: str, files: RunFiles, second: str, others: RunFiles) -> dict[str, Any]:
    """The held-out tasks that two runs share, by their content: reward after training, with the paired difference."""
    found: dict[str, Any] = {"first": first, "second": second, "modes": {}, "error": ""}
    try:
        mine, theirs = files.state(), others.state()
        own, other = files.tasks("held_out"), others.tasks("held_out")
    except AgentLightningError as error:
        return found | {"error": str(error)}
    places = {task_key(task): place for place, task in enumerate(other)}
    pairs = [(i, places[key], task) for i, task in enumerate(own) if (key := task_key(task)) in places]
    for name in mine.evaluations:
        mode = name.removeprefix("after-")
        if mode == name or name not in theirs.evaluations:
            continue
        before, after = mine.evaluations[name], theirs.evaluations[name]
        rows = [(before[i], after[j], task) for i, j, task in pairs if i < len(before) and j < len(after)]
        found["modes"][mode] = _mode(rows)
    if not found["modes"]:
        found["error"] = "these runs have no held-out tasks in common that both have measured"
    return found


def _mode(rows: Sequence[tuple[float | None, float | None, Any]]) -> dict[str, Any]:
    try:
        result = asdict(compare_tasks([[a] for a, _, _ in rows], [[b] for _, b, _ in rows]))
    except RewardError as error:
        return {"error": str(error), "won": [], "lost": [], "tasks": len(rows)}
    known = [(b - a, a, b, task) for a, b, task in rows if a is not None and b is not None]
    won = sorted((each for each in known if each[0] > 0), key=lambda each: -each[0])
    lost = sorted((each for each in known if each[0] < 0), key=lambda each: each[0])
    return {
        "result": result,
        "won": [_task(*each) for each in won[:MOST_TASKS]],
        "lost": [_task(*each) for each in lost[:MOST_TASKS]],
        "tasks": len(rows),
    }


def _task(difference: float, first: float, second: float, task: Any) -> dict[str, Any]:
    return {"task": shortened(task), "first": first, "second": second, "difference": difference}
