"""The list of runs; the pages of one: curves, state, result, warnings, settings, checkpoints, its tasks, its prompts
and weights, its prompt search; several side by side."""

from __future__ import annotations

import asyncio
import difflib
import math
import re
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from agentlightning.algorithms.apo.text import PARENT
from agentlightning.dashboard.data.rollouts import RolloutSummary, Updates, grouped, shortened
from agentlightning.dashboard.data.run_data import STORE, Catalog, RunData, files_of_run
from agentlightning.dashboard.data.run_files import (
    RunFiles,
    bounds_of,
    compared_configurations,
    configurations,
    joined_runs,
    status_record,
)
from agentlightning.dashboard.query import Query
from agentlightning.errors import AgentLightningError, ConfigError, ResumeError, RewardError
from agentlightning.evaluation.intervals import compare_tasks, mean_interval, mean_of_seeds, paired_gain
from agentlightning.resources import PromptTemplate, ResourcesUpdate, named_resources, prompts_in
from agentlightning.rollouts import Rollout
from agentlightning.task import task_key
from agentlightning.training.governance import AuditRecord
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.report.result import cost_of_steps, won_and_lost
from agentlightning.util.json_values import Json

# -- curves -----------------------------------------------------------------------------------------------------------


T = TypeVar("T")
MOST_POINTS = 2000
"""Steps that are sent."""


PLAIN: Json = {"metrics": {}, "others": "", "unit": "", "spread": "", "log": False}
CHARTS: list[Json] = [
    PLAIN | each for each in tomllib.loads((Path(__file__).parents[1] / "charts.toml").read_text())["chart"]
]


def charts_of(metrics: Sequence[Mapping[str, Any]]) -> Json:
    """The charts that have a number, whether it is the same at all steps, and the metrics that are in none of them."""
    rows = thinned(metrics)
    names = list(dict.fromkeys(name for row in metrics for name, value in row.items() if number_of(value) is not None))
    columns = {name: [number_of(row.get(name)) for row in rows] for name in names}
    used, found = {"step", "revision"}, list[Json]()
    for chart in CHARTS:
        labels = {name: label for name, label in chart["metrics"].items() if name in names}
        matches = [match for name in names if (match := re.fullmatch(chart["others"], name))]
        labels |= {match[0]: match[1].replace("_", " ") for match in matches}
        series = [{"metric": name, "label": label, "values": columns[name]} for name, label in labels.items()]
        known = [[value for value in columns[name] if value is not None] for name in labels]
        if any(known):
            used |= {*labels, chart["spread"]}
            constant = any(len(own) > 1 for own in known) and all(len(set(own)) < 2 for own in known)
            band = _band(series[0]["values"], columns.get(chart["spread"], ()))
            found.append(chart | {"series": series, "band": band, "constant": constant})
    others = {name: values for name, values in columns.items() if name not in used}
    return {
        "steps": [row.get("step") for row in rows],
        "charts": found,
        "others": [{"metric": name, "label": name.replace("_", " "), "values": own} for name, own in others.items()],
        "thinned": len(metrics) - len(rows),
    }


def _band(values: Sequence[float | None], widths: Sequence[float | None]) -> Json | None:
    if not any(width is not None for width in widths):
        return None
    pairs = [*zip(values, widths, strict=True)]
    low, high = ([None if m is None or w is None else m + sign * w for m, w in pairs] for sign in (-1, 1))
    return {"label": "± standard deviation within a group", "low": low, "high": high}


def number_of(value: Any) -> float | None:
    """A value as a number; None for what is none."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def thinned(values: Sequence[T], most: int = MOST_POINTS) -> Sequence[T]:
    """At most so many of them, the first and the last one included."""
    last = len(values) - 1
    return values if last < most else [values[round(place * last / (most - 1))] for place in range(most)]


# -- runs -------------------------------------------------------------------------------------------------------------


WINDOW = 5
"""Steps that the reward at the start and the reward now are means of."""


async def list_runs(data: Catalog, query: Query) -> Json:
    """Every run and store, and which runs are seeds of one configuration."""
    sources = data.sources()
    runs = sorted(filter(None, sources.values()), key=lambda each: -each.changed())
    found = [await asyncio.to_thread(summary, each) for each in runs]
    # One that cannot be read stands alone.
    readable = [run for run, each in zip(runs, found, strict=True) if "error" not in each and run.config()]
    joined = await asyncio.to_thread(joined_runs, readable)
    store = [OF_STORE] if STORE in sources else []
    return {"runs": [*found, *store], "joined": joined, "writable": data.writable}


async def show_status(run: RunData, query: Query) -> Json:
    """One run as `agl status` prints it."""
    record, rewards = await asyncio.to_thread(status_record, run.run())
    return {"status": record, "rewards": rewards}


async def show_run(run: RunData, query: Query) -> Json:
    """One run: its curves, warnings, result, settings and checkpoints."""
    if run.files is None:
        return {"summary": OF_STORE, "store": await run.store.statistics(), "writable": run.writable}
    return await asyncio.to_thread(_show, run.files) | {"writable": run.writable}


def _show(files: RunFiles) -> Json:
    state = files.state()
    return {
        "summary": summary(files),
        "curves": charts_of(files.metrics()),
        "warnings": warnings_of(files, state),
        "held_out": held_out(files, state),
        "report": _report(files, state),
        "settings": files.settings(),
        "settings_error": files.config_error(),
        "changes": files.changes(),
        "checkpoints": _checkpoints(files, state),
    }


OF_STORE: Json = {"name": STORE, "kind": "store", "state": "store", "warnings": 0}
"""The line of a store by itself in the list of runs."""


def summary(files: RunFiles) -> Json:
    """A line of the list of runs. One that cannot be read has an `error` that says why."""
    try:
        state = files.state()
    except ResumeError as error:
        return {"name": files.name, "kind": "run", "state": "unreadable", "error": str(error), "warnings": 0}
    config, metrics, status = files.config(), files.metrics(), files.status()
    rewards = [r for row in metrics if (r := number_of(row.get("reward"))) is not None]
    speeds = [s for row in metrics[-WINDOW:] if (s := number_of(row.get("tokens_per_second"))) is not None]
    return {
        "name": files.name,
        "kind": "run",
        "state": status,
        "algorithm": state.algorithm or (config and config.algorithm.type),
        "model": config.policy.model if config is not None and state.learns_weights else None,
        "agent": config and (config.agent or ("a live object" if "agent" in state.objects else None)),
        "step": max(state.step, len(metrics)),
        "steps": files.steps(),
        "seconds": state.seconds,
        "time_left": files.seconds_left() if status == "running" else None,
        "reward_start": window(rewards[:WINDOW]),
        "reward_now": window(rewards[-WINDOW:]),
        "rewards": rewards[-200:],
        "tokens_per_second": statistics.fmean(speeds) if speeds else None,
        "cost": cost_of(files),
        "rollouts": state.rollouts,
        "failed_rollouts": state.failed_rollouts,
        "warnings": len(state.warnings),
        "warning_names": sorted(state.warnings),
        "held_out": held_out(files, state),
        "changed": files.changed(),
    }


def cost_of(files: RunFiles) -> Json:
    """Tokens and, where prices are set, US dollars: those of the report, else of the steps so far, in which calls to
    providers are not counted yet."""
    known: Mapping[str, Any] = (files.report() or {}).get("cost") or cost_of_steps(files.metrics()).as_json()
    tokens = sum(int(known.get(name) or 0) for name in ("sampled_tokens", "search_tokens", "provider_tokens"))
    prices = [each for name in ("search_money", "provider_dollars") if (each := known.get(name)) is not None]
    return {"tokens": tokens, "dollars": sum(prices) if prices else None}


def window(values: Sequence[float]) -> Json | None:
    """The mean of some steps, and its 95% interval by Student's t, between 0 and 1 where all values are; None without
    values. One step has no interval."""
    if not values:
        return None
    found = mean_of_seeds(dict(enumerate(values)), bounds_of(values)[0])
    low, high = found.interval or (None, None)
    return {"mean": found.mean, "low": low, "high": high, "steps": found.seeds}


def held_out(files: RunFiles, state: RunState) -> Json:
    """Held-out reward before and after by mode: the means with their intervals, and the paired gain of the report."""
    report = files.report() or {}
    gains: Mapping[str, Any] = report.get("held_out") or {}
    modes = dict.fromkeys([*gains, *held_out_modes(state)])
    return {
        mode: {
            "before": measured(state.evaluations.get(f"before-{mode}", ())),
            "after": measured(state.evaluations.get(f"after-{mode}", ())),
            "gain": gains.get(mode),
        }
        for mode in modes
    }


def held_out_modes(state: RunState) -> list[str]:
    """The modes that the held-out tasks were measured in."""
    return [name.partition("-")[2] for name in state.evaluations if name.startswith(("before-", "after-"))]


def measured(rewards: Sequence[float | None]) -> Json | None:
    """The mean of an evaluation with its 95% interval over tasks; None where no task has a reward."""
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return None
    low, high = mean_interval(rewards)
    missing = len(rewards) - len(known)
    return {"mean": statistics.fmean(known), "low": low, "high": high, "tasks": len(rewards), "missing": missing}


def mean_of(rows: Iterable[RolloutSummary]) -> Json | None:
    """As `measured`, of the rewards of rollouts."""
    return measured([row.reward_number for row in rows])


def warnings_of(files: RunFiles, state: RunState) -> list[Json]:
    """What the doctor finds, since which step, in the words of the last such step, and what the run itself has
    warned of besides."""
    signs = files.signs()
    found = [{**asdict(each.sign), "since": each.since, "until": each.until, "count": each.count} for each in signs]
    seen = {each["name"] for each in found}
    for kind, text in state.warnings.items():
        if kind not in seen:
            began = re.match(r"step (\d+):", text)
            since = began and int(began[1])
            found.append({"name": kind, "what": text, "advice": "", "since": since, "until": None, "count": 1})
    return found


def _report(files: RunFiles, state: RunState) -> Json | None:
    """Of the result the best step, and the warnings that `warnings_of` has not."""
    report = files.report()
    if report is None:
        return None
    warnings = [text for text in report.get("warnings") or () if text not in state.warnings.values()]
    return {"best_step": report.get("best_step"), "warnings": warnings}


def _checkpoints(files: RunFiles, state: RunState) -> list[Json]:
    roles = [("current", state.checkpoint), ("best", state.best_checkpoint)]
    roles += [(role, each["directory"]) for role, each in state.kept.items() if role != "candidate"]
    return [
        {
            "directory": f"checkpoints/{path.name}",
            "step": int(step) if (step := path.name.removeprefix("step-")).isdecimal() else None,
            "bytes": sum(each.stat().st_size for each in path.rglob("*") if each.is_file()),
            "roles": [role for role, directory in roles if directory == f"checkpoints/{path.name}"],
        }
        for path in sorted((files.path / "checkpoints").glob("step-*"))
    ]


# -- several runs -----------------------------------------------------------------------------------------------------


MOST_RUNS = 24
MOST_TASKS = 100
"""Tasks that are listed as won, and as lost."""
METRICS = (
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


async def compare(data: Catalog, query: Query) -> Json:
    """`runs=A,B,...`: the runs by configuration, each compared with that of the first."""
    names = list(dict.fromkeys(query.names("runs")))
    if not 2 <= len(names) <= MOST_RUNS:
        raise ConfigError(f"runs={','.join(names)!r} names {len(names)} runs; name 2 to {MOST_RUNS}, as runs=A,B")
    return await asyncio.to_thread(_compare, [files_of_run(name, data.source(name)) for name in names])


def _compare(runs: Sequence[RunFiles]) -> Json:
    groups, rows, ungrouped = [[run] for run in runs], list[Json](), ""
    try:
        found = configurations(runs)
        groups = [[*each.runs.values()] for each in found]
        rows = compared_configurations(found)
    except AgentLightningError as error:
        ungrouped = str(error)
    heads = [group[0] for group in groups]
    return {
        "groups": [[run.name for run in group] for group in groups],
        "configurations": rows,
        "ungrouped": ungrouped,
        "curves": [{"metric": each, "series": [_curve(each, group) for group in groups]} for each in METRICS],
        "settings": _different_settings(heads),
        "tasks": [_shared_tasks(heads[0], other) for other in heads[1:]],
        "summaries": [summary(run) for run in runs],
    }


def _curve(metric: str, group: Iterable[RunFiles]) -> Json:
    """A metric by step: the mean over the runs of a configuration, as far as all of them are, with its interval."""
    lines = [[(row["step"], number_of(row.get(metric))) for row in run.metrics()] for run in group]
    known = [{step: value for step, value in line if value is not None} for line in lines]
    steps = thinned(sorted(set.intersection(*map(set, known))))
    means = [mean_of_seeds(dict(enumerate(line[step] for line in known))) for step in steps]
    low, high = ([each.interval and each.interval[side] for each in means] for side in (0, 1))
    return {"steps": steps, "values": [each.mean for each in means], "low": low, "high": high}


def _different_settings(runs: Iterable[RunFiles]) -> list[Json]:
    """Settings whose values differ, by name."""
    settings = {run.name: run.settings() for run in runs}
    found: list[Json] = [
        {"setting": setting, "values": {name: own.get(setting) for name, own in settings.items()}}
        for setting in sorted({*chain(*settings.values())})
    ]
    return [each for each in found if len({*map(repr, each["values"].values())}) > 1]


def _shared_tasks(first: RunFiles, second: RunFiles) -> Json:
    """The held-out tasks that two runs share, by their content: reward after training, with the paired difference."""
    found: Json = {"first": first.name, "second": second.name, "modes": {}, "error": ""}
    try:
        mine, theirs = (each.state().evaluations for each in (first, second))
    except AgentLightningError as error:
        return found | {"error": str(error)}
    own, others = ([(task_key(task), task) for task in each.tasks("held_out")] for each in (first, second))
    for name in mine:
        if name.startswith("after-") and name in theirs:
            known = {key: reward for (key, _), reward in zip(others, theirs[name], strict=False)}
            rows = [(a, known[key], task) for (key, task), a in zip(own, mine[name], strict=False) if key in known]
            found["modes"][name.removeprefix("after-")] = _mode(rows)
    if not found["modes"]:
        found["error"] = "these runs have no held-out tasks in common that both have measured"
    return found


def _mode(rows: Sequence[tuple[float | None, float | None, Any]]) -> Json:
    try:
        result = asdict(compare_tasks([[a] for a, _, _ in rows], [[b] for _, b, _ in rows]))
    except RewardError as error:
        return {"error": str(error), "won": [], "lost": [], "tasks": len(rows)}
    won, lost = (
        [
            {"task": shortened(each.task), "first": each.before, "second": each.after, "difference": each.gain}
            for each in changed[:MOST_TASKS]
        ]
        for changed in won_and_lost((task, a, b) for a, b, task in rows)
    )
    return {"result": result, "won": won, "lost": lost, "tasks": len(rows)}


# -- the tasks that measure a run -------------------------------------------------------------------------------------
#
# Held out or of validation: which were won and lost, and by which rollouts. All is read from the rewards of the
# measuring rollouts, as far as the store still has them.


SETS = ("held_out", "validation")
MOST_MEASUREMENTS = 12
"""Measurements in the table of tasks; of more, the first, the last and some between."""
MOST_OF_SET = 500
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
        modes: dict[str, list[Json]] = {}
        for mode, own in steps.items():
            means = {label: mean_of(rows) for label, rows in (await _points(run, own)).items()}
            modes[mode] = [{"step": int(label), **mean} for label, mean in means.items() if mean]
        return {"modes": {mode: own for mode, own in modes.items() if own}}
    names = [*dict.fromkeys([*held_out_modes(files.state()), *steps])]
    mode = query.choice("mode", names, next(iter(names), None))
    held_out = {} if mode is None else _held_out(files, mode)
    wanted = held_out if chosen == "held_out" else dict(thinned([*steps.get(str(mode), {}).items()], MOST_MEASUREMENTS))
    return {"set": chosen, "mode": mode, "names": names, **_by_task(await _points(run, wanted))}


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
            result = {
                "gain": gain.gain,
                "interval": gain.interval,
                "tasks": len(changes),
                "better": sum(change > 0 for change in changes),
                "worse": sum(change < 0 for change in changes),
                "left_out": len(found) - len(changes),
            }
        except RewardError as problem:
            error = str(problem)
    found.sort(key=lambda each: (each["change"] is None, -abs(each["change"] or 0.0), each["change"] or 0.0))
    return {
        "measurements": [{"label": label, "reward": mean_of(rows)} for label, rows in points.items()],
        "tasks": found[:MOST_OF_SET],
        "all_tasks": len(found),
        "result": result,
        "error": error,
    }


def _task(key: str, measurements: Sequence[Sequence[RolloutSummary]]) -> Json:
    means: list[Any] = [found and found["mean"] for found in map(mean_of, measurements)]
    columns = zip(means, measurements, strict=True)
    cells = [{"mean": mean, "rollouts": [row.rollout_id for row in rows]} for mean, rows in columns]
    change = None if means[0] is None or means[-1] is None else means[-1] - means[0]
    return {"task_key": key, "task": next(chain(*measurements)).task, "cells": cells, "change": change}


# -- prompts and weights ----------------------------------------------------------------------------------------------


PAGE = 50
MOST_LINES = 2000


async def list_resources(run: RunData, query: Query) -> Json:
    """Versions of the resources, the newest first, each with what it changed against the one published before it."""
    limit, offset = query.integer("limit", PAGE, 1, 200), query.integer("after", 0)
    contains = query.text("id") or run.in_ids
    newest = await run.store.query_resources(
        resources_id_contains=contains, sort_by="version", sort_order="desc", limit=limit + 1, offset=offset
    )
    pairs = zip(newest[:limit], [*newest[1:], None], strict=False)
    return {
        "versions": [_version(*each, run.updates) for each in pairs],
        "next": str(offset + limit) if len(newest) > limit else None,
    }


def _version(update: ResourcesUpdate, before: ResourcesUpdate | None, updates: Updates) -> Json:
    resources = named_resources.dump_python(update.resources, mode="json")
    for each in resources.values():
        if (version := each.get("policy_version")) is not None:
            each["policy_version"] = updates(version)
        if each.get("api_key"):
            each["api_key"] = "(hidden)"
    return {
        "resources_id": update.resources_id,
        "version": update.version,
        "create_time": update.create_time,
        "resources": resources,
        "changed": changed_prompts(prompts_in(before.resources if before else {}), prompts_in(update.resources)),
        "before": before and before.resources_id,
    }


def changed_prompts(old: Mapping[str, PromptTemplate], new: Mapping[str, PromptTemplate]) -> list[Json]:
    """The prompt templates that differ, line by line: kind `same`, `added` or `removed`. One without a counterpart is
    left out: it is new."""
    kinds, found = {" ": "same", "+": "added", "-": "removed"}, list[Json]()
    for name, each in new.items():
        if name in old and old[name] != each:
            diff = difflib.ndiff(old[name].template.splitlines(), each.template.splitlines())
            lines = [{"kind": kinds[line[0]], "text": line[2:]} for line in diff if line[0] in kinds]
            found.append({"name": name, "lines": lines[:MOST_LINES]})
    return found


async def list_weights(run: RunData, query: Query) -> Json:
    """Versions of the weights by the audit log, the newest first: from which rollouts, with which scores, what the gate
    decided, and which checkpoints hold them."""
    files, limit, offset = run.run(), query.integer("limit", 200, 1, 2000), query.integer("after", 0)
    newest, state = (await asyncio.to_thread(files.audit))[::-1], files.state()
    kept = {path.name for path in (files.path / "checkpoints").glob("step-*")}
    return {
        "records": [_record(each, kept, run.updates) for each in newest[offset : offset + limit]],
        "next": str(offset + limit) if offset + limit < len(newest) else None,
        "best_step": state.best_step,
        "has_audit": bool(newest),
    }


def _record(record: AuditRecord, kept: set[str], updates: Updates) -> Json:
    version = None if record.version is None else updates(record.version)
    fields = structs.asdict(record)
    del fields["resources"]
    return {
        **fields,
        "version": version,
        "parent": version - 1 if version else None,
        "rollouts": len(record.rollouts),
        "has_checkpoint": f"step-{record.step:06d}" in kept,
    }


# -- a prompt search --------------------------------------------------------------------------------------------------


TRIAL = re.compile(r"-([0-9a-f]{16})-(train|validation)\d{5}-\d+(-again|$)")
"""In the id of a rollout: a digest of the candidate's texts, and the tasks that it was tried on."""


async def show_search(run: RunData, query: Query) -> Json:
    """The candidates of a search, as far as the store has their rollouts."""
    trials, result = f"{run.run_id}-trial-", run.run().prompts()["prompts"]
    updates = await run.store.query_resources(resources_id_contains=trials)
    prompts = {each.resources_id: prompts_in(each.resources) for each in updates}
    rollouts = await run.store.query_rollouts(rollout_id_contains=trials)
    rows = zip(rollouts, await run.summaries.of(rollouts), strict=True)
    return {"candidates": await asyncio.to_thread(_candidates, rows, prompts, result)}


def _candidates(
    rows: Iterable[tuple[Rollout, RolloutSummary]],
    prompts: Mapping[str, Mapping[str, PromptTemplate]],
    result: Mapping[str, str],
) -> list[Json]:
    """Each with the evaluation of the search that was its first, `at`; the one that it was made from (None: the first
    of a search, or not known), and what it changed of it; and whether it is the result, or `led` to it."""
    found: dict[str, Json] = {}
    texts: dict[str, Mapping[str, PromptTemplate]] = {}
    tried: dict[str, dict[str, list[RolloutSummary]]] = {}
    for at, (rollout, row) in enumerate(rows, 1):
        named, own = TRIAL.search(row.rollout_id), prompts.get(row.resources_id or "")
        if named is None or own is None:
            continue
        if (digest := named[1]) not in found:
            parent = str(rollout.metadata.get(PARENT))
            found[digest] = {
                "number": len(found),
                "at": at,
                "parent": found[parent]["number"] if parent in found else None,
                "led": False,
                "texts": {name: each.template for name, each in own.items()},
                "changed": changed_prompts(texts.get(parent, {}), own),
            }
            texts[digest], tried[digest] = own, {"train": [], "validation": []}
        tried[digest][named[2]].append(row)
    every = list(found.values())
    for each, parts in zip(every, tried.values(), strict=True):
        tokens = sum(row.prompt_tokens + row.sampled_tokens for row in chain(*parts.values()))
        means = {part: mean_of(own) for part, own in parts.items()}
        each |= {"tokens": tokens, "result": each["texts"] == result, **means}
    best = next((each for each in every if each["result"]), None)
    while best is not None:
        best["led"] = True
        best = None if best["parent"] is None else every[best["parent"]]
    return every
