"""Several runs side by side, by configuration: curves, settings that differ, tasks won and lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.configurations import configurations, record_of
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.data.text import shortened
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.curves import number_of, thinned
from agentlightning.dashboard.views.runs import summary
from agentlightning.errors import AgentLightningError, ConfigError, RewardError
from agentlightning.evaluation.intervals import compare_tasks, mean_of_seeds
from agentlightning.task import task_key
from agentlightning.util.json_values import Json

MOST_RUNS: Final = 24
MOST_TASKS: Final = 100
"""Tasks that are listed as won, and as lost."""
METRICS: Final = (
    "reward",
    "validation_greedy",
    "validation_sampled",
    "entropy",
    "grad_norm",
    "approx_kl",
    "clip_fraction",
    "response_tokens",
    "groups_without_spread",
    "tokens_per_second",
)
"""Those whose curves are shown."""
Groups = Sequence[Sequence[str]]
"""Names of runs by configuration."""


async def compare(data: Catalog, query: Query) -> Json:
    """`runs=A,B,...`: the runs by configuration, each compared with that of the first."""
    names = list(dict.fromkeys(query.names("runs")))
    if not 2 <= len(names) <= MOST_RUNS:
        raise ConfigError(f"runs={','.join(names)!r} names {len(names)} runs; name 2 to {MOST_RUNS}, as runs=A,B")
    sources = [data.source(name) for name in names]
    files = {each.name: each.run() for each in sources}
    return await asyncio.to_thread(_compare, files) | {
        "summaries": [await asyncio.to_thread(summary, each) for each in sources]
    }


def _compare(files: Mapping[str, RunFiles]) -> Json:
    groups: Groups = [[name] for name in files]
    rows: list[Json] = []
    ungrouped = ""
    try:
        found = configurations([each.path for each in files.values()])
        names = {each.path: name for name, each in files.items()}
        groups = [[names[run] for run in each.runs.values()] for each in found]
        rows = record_of(found)
    except AgentLightningError as error:
        ungrouped = str(error)
    heads = [group[0] for group in groups]
    first = heads[0]
    return {
        "groups": groups,
        "configurations": rows,
        "ungrouped": ungrouped,
        "curves": [{"metric": each, "series": _curves(each, groups, files)} for each in METRICS],
        "settings": _differences(heads, [files[name] for name in heads]),
        "tasks": [_tasks(first, files[first], name, files[name]) for name in heads[1:]],
    }


def _curves(metric: str, groups: Groups, files: Mapping[str, RunFiles]) -> list[Json]:
    """A metric by step: of each configuration the mean over its runs, as far as all of them are, with its interval."""
    found: list[Json] = []
    for group in groups:
        lines = [{row["step"]: number_of(row.get(metric)) for row in files[name].metrics()} for name in group]
        known = [{step: value for step, value in line.items() if value is not None} for line in lines]
        steps = thinned(sorted(set.intersection(*map(set, known))))
        means = [mean_of_seeds({seed: line[step] for seed, line in enumerate(known)}) for step in steps]
        edges = [each.interval or (None, None) for each in means]
        found.append(
            {
                "steps": steps,
                "values": [each.mean for each in means],
                "low": [low for low, _ in edges],
                "high": [high for _, high in edges],
            }
        )
    return found


def _differences(names: Sequence[str], files: Sequence[RunFiles]) -> list[Json]:
    """Settings whose values differ, by name."""
    settings = [each.settings() for each in files]
    found: list[Json] = []
    for setting in sorted({name for each in settings for name in each}):
        values = [each.get(setting) for each in settings]
        if any(value != values[0] for value in values):
            found.append({"setting": setting, "values": dict(zip(names, values, strict=True))})
    return found


def _tasks(first: str, files: RunFiles, second: str, others: RunFiles) -> Json:
    """The held-out tasks that two runs share, by their content: reward after training, with the paired difference."""
    found: Json = {"first": first, "second": second, "modes": {}, "error": ""}
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


def _mode(rows: Sequence[tuple[float | None, float | None, Any]]) -> Json:
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


def _task(difference: float, first: float, second: float, task: Any) -> Json:
    return {"task": shortened(task), "first": first, "second": second, "difference": difference}
