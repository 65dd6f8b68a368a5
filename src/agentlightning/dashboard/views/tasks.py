"""The tasks that measure a run, held out or of validation: which were won and lost, and by which rollouts.

All is read from the rewards of the measuring rollouts, as far as the store still has them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from agentlightning.dashboard.data.rollouts import RolloutSummary, grouped
from agentlightning.dashboard.data.run_data import RunData
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.runs import held_out_modes, measured
from agentlightning.errors import RewardError
from agentlightning.evaluation.intervals import paired_gain
from agentlightning.util.json_values import Json

SETS: Final = ("held_out", "validation")
MOST_POINTS: Final = 12
"""Measurements in the table of tasks; of more, the first, the last and some between."""
MOST_TASKS: Final = 500
"""Tasks in the table, those that changed most first."""
Points = Mapping[str, Sequence[RolloutSummary]]
"""Label of a measurement -> its rollouts."""
Names = Mapping[str, str]
"""Label of a measurement -> what the ids of its rollouts begin with, after that of the run. Those of before a change of
what rewards mean have other names."""


async def list_tasks(run: RunData, query: Query) -> Json:
    """The validations by mode and step, each with the 95% interval of its mean over tasks; with `set` and `mode`
    instead one set of tasks through its measurements."""
    files = run.run()
    steps = _steps(files)
    chosen = query.choice("set", SETS)
    if chosen is None:
        return {"modes": {mode: found for mode, own in steps.items() if (found := await _means(run, own))}}
    names = [*dict.fromkeys([*held_out_modes(files.state()), *steps])]
    mode = query.choice("mode", names, next(iter(names), None))
    held_out = {} if mode is None else _held_out(files, mode)
    wanted = held_out if chosen == "held_out" else _thinned(steps.get(str(mode), {}))
    return {"set": chosen, "mode": mode, "names": names, **_by_task(await _points(run, wanted))}


async def _means(run: RunData, steps: Names) -> list[Json]:
    points = await _points(run, steps)
    return [{"step": int(label), **found} for label, rows in points.items() if (found := _mean(rows)) is not None]


def _steps(files: RunFiles) -> dict[str, dict[str, str]]:
    """The validations by mode and step."""
    found: dict[str, dict[str, str]] = {}
    for line in files.metrics():
        for name in line:
            if name.startswith("validation_"):
                mode, step, revision = name.removeprefix("validation_"), int(line["step"]), line.get("revision")
                suffix = f"-changed{revision}" if revision else ""
                found.setdefault(mode, {})[str(step)] = f"validation-{step:06d}-{mode}{suffix}"
    return found


def _held_out(files: RunFiles, mode: str) -> dict[str, str]:
    """Before training, after each stage of a sequential run, and under the weights that the result names."""
    state = files.state()
    step = state.measured_step if state.measured_step is not None else state.best_step or state.step
    stages = {f"after stage {place + 1}": f"stage-{place:02d}" for place in range(len(state.stages) - 1)}
    purposes = {"before": "before", **stages, "after": f"after-{step:06d}"}
    return {label: f"{purpose}-{mode}{state.suffix}" for label, purpose in purposes.items()}


async def _points(run: RunData, wanted: Names) -> dict[str, list[RolloutSummary]]:
    """The rollouts of measurements, as far as the store has them."""
    found: dict[str, list[RolloutSummary]] = {}
    for label, own_name in wanted.items():
        name = f"{run.run_id}-{own_name}-"
        rollouts = await run.store.query_rollouts(rollout_id_contains=name)
        own = [each for each in rollouts if each.rollout_id.partition(name)[2][:1].isdecimal()]
        if own:
            found[label] = await run.summaries.of(own)
    return found


def _thinned(steps: Names) -> Names:
    if len(steps) <= MOST_POINTS:
        return steps
    kept = {round(place * (len(steps) - 1) / (MOST_POINTS - 1)) for place in range(MOST_POINTS)}
    return {step: name for place, (step, name) in enumerate(steps.items()) if place in kept}


def _mean(rows: Sequence[RolloutSummary]) -> Json | None:
    return measured([row.reward_number for row in rows])


def _by_task(points: Points) -> Json:
    """Each task through the measurements, and the last compared with the first, as the gain of a run's result is
    computed, with the tasks won and lost."""
    by_key = [grouped(rows, lambda row: row.task_key or row.task) for rows in points.values()]
    found = [_task(key, [own.get(key, []) for own in by_key]) for key in dict.fromkeys(chain(*by_key))]
    result, error = None, "fewer than two measurements are in the store: nothing can be compared"
    if len(points) > 1:
        try:
            first, last = ([each["cells"][place]["mean"] for each in found] for place in (0, -1))
            gain, error = paired_gain(first, last), ""
            changes = [each["change"] for each in found if each["change"] is not None]
            better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
            counts = {"tasks": len(changes), "better": better, "worse": worse, "left_out": len(found) - len(changes)}
            result = {"gain": gain.gain, "interval": gain.interval, **counts}
        except RewardError as problem:
            error = str(problem)
    found.sort(key=lambda each: (each["change"] is None, -abs(each["change"] or 0.0), each["change"] or 0.0))
    return {
        "measurements": [{"label": label, "reward": _mean(rows)} for label, rows in points.items()],
        "tasks": found[:MOST_TASKS],
        "all_tasks": len(found),
        "result": result,
        "error": error,
    }


def _task(key: str, measurements: Sequence[Sequence[RolloutSummary]]) -> Json:
    cells: list[Json] = []
    for rows in measurements:
        known = [row.reward_number for row in rows if row.reward_number is not None]
        ids = [row.rollout_id for row in rows]
        mean = statistics.fmean(known) if known else None
        cells.append({"mean": mean, "missing": len(rows) - len(known), "rollouts": ids})
    first, last = cells[0]["mean"], cells[-1]["mean"]
    change = None if first is None or last is None else last - first
    return {"task_key": key, "task": next(chain(*measurements)).task, "cells": cells, "change": change}
