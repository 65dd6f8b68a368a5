"""The list of runs, and the page of one: state, result, warnings, settings, checkpoints."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.configurations import bounds_of, joined_runs
from agentlightning.dashboard.data.run_data import Source
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.data.status import seconds_left, status_record
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.curves import charts_of
from agentlightning.errors import AgentLightningError
from agentlightning.evaluation.intervals import mean_interval, mean_of_seeds
from agentlightning.training.persistence.checkpoints import prompts_of
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.report.result import cost_of_steps
from agentlightning.util.json_values import Json

WINDOW: Final = 5
"""Steps that the reward at the start and the reward now are means of."""


async def list_runs(data: Catalog, query: Query) -> Json:
    """Every run and store, and which runs are seeds of one configuration."""
    sources = data.sources()
    found = [await asyncio.to_thread(summary, each) for each in sources]
    joined = await asyncio.to_thread(joined_runs, {each.name: each.files for each in sources if each.files is not None})
    return {"runs": found, "joined": joined, "writable": data.writable}


async def show_status(data: Catalog, query: Query) -> Json:
    """One run as `agl status` prints it."""
    run = await data.run(query.part("run"))
    record, rewards = await asyncio.to_thread(status_record, run.source.run().path)
    return {"status": record, "rewards": rewards}


async def show_run(data: Catalog, query: Query) -> Json:
    """One run: its curves, warnings, result, settings and checkpoints."""
    run = await data.run(query.part("run"))
    if run.files is None:
        return {"summary": summary(run.source), "store": await run.store.statistics(), "writable": data.writable}
    return await asyncio.to_thread(_show, run.source, run.files) | {"writable": data.writable}


def _show(source: Source, files: RunFiles) -> Json:
    state = files.state()
    return {
        "summary": summary(source),
        "curves": charts_of(files.metrics()),
        "warnings": warnings_of(files, state),
        "held_out": held_out(files, state),
        "report": _report(files, state),
        "settings": files.settings(),
        "settings_error": files.config_error(),
        "changes": files.changes(),
        "checkpoints": _checkpoints(files, state),
    }


def prompts_now(files: RunFiles) -> Json:
    """The prompts that would be the result if the run ended now, and what has changed in them."""
    return prompts_of(files.path, "checkpoint" if files.status() == "finished" else files.state().checkpoint)


def summary(source: Source) -> Json:
    """A line of the list of runs. One that cannot be read has an `error` that says why."""
    if source.files is None:
        return {"name": source.name, "kind": "store", "state": "store", "warnings": 0}
    try:
        return _summary(source.name, source.files)
    except AgentLightningError as error:
        return {"name": source.name, "kind": "run", "state": "unreadable", "error": str(error), "warnings": 0}


def _summary(name: str, files: RunFiles) -> Json:
    state, config, metrics, status = files.state(), files.config(), files.metrics(), files.status()
    algorithm = state.algorithm or (None if config is None else config.algorithm.type)
    # The settings say nothing of the steps of an algorithm object.
    total = None if config is None or state.algorithm else getattr(config.algorithm, "steps", None)
    rewards = [float(r) for row in metrics if isinstance(r := row.get("reward"), int | float) and math.isfinite(r)]
    speeds = [float(s) for row in metrics[-WINDOW:] if isinstance(s := row.get("tokens_per_second"), int | float)]
    return {
        "name": name,
        "kind": "run",
        "state": status,
        "algorithm": algorithm,
        "model": config.policy.model if config is not None and state.learns_weights else None,
        "agent": None if config is None else config.agent or ("a live object" if "agent" in state.objects else None),
        "step": len(metrics) if state.step == 0 else max(state.step, len(metrics)),
        "steps": total,
        "seconds": state.seconds,
        "time_left": seconds_left(state, total) if status == "running" else None,
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
        "changed": (files.path / "state.json").stat().st_mtime,
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
            "before": measured(state.evaluations.get(f"before-{mode}")),
            "after": measured(state.evaluations.get(f"after-{mode}")),
            "gain": gains.get(mode),
        }
        for mode in modes
    }


def held_out_modes(state: RunState) -> list[str]:
    """The modes that the held-out tasks were measured in."""
    return [name.partition("-")[2] for name in state.evaluations if name.startswith(("before-", "after-"))]


def measured(rewards: Sequence[float | None] | None) -> Json | None:
    """The mean of an evaluation with its 95% interval over tasks; None where no task has a reward."""
    known = [reward for reward in rewards or () if reward is not None]
    if rewards is None or not known:
        return None
    low, high = mean_interval(rewards)
    return {
        "mean": statistics.fmean(known),
        "low": low,
        "high": high,
        "tasks": len(rewards),
        "missing": len(rewards) - len(known),
    }


def warnings_of(files: RunFiles, state: RunState) -> list[Json]:
    """What the doctor finds, since which step, in the words of the last such step, and what the run itself has
    warned of besides."""
    found = [
        {**asdict(each.sign), "since": each.since, "until": each.until, "count": each.count} for each in files.signs()
    ]
    seen = {each["name"] for each in found}
    for kind, text in state.warnings.items():
        if kind not in seen:
            found.append({"name": kind, "what": text, "advice": "", "since": _step_of(text), "until": None, "count": 1})
    return found


def _step_of(text: str) -> int | None:
    """The step that a warning begins with: `step 3: ...`."""
    head, _, _ = text.partition(":")
    number = head.removeprefix("step ")
    return int(number) if head.startswith("step ") and number.isdecimal() else None


def _report(files: RunFiles, state: RunState) -> Json | None:
    """Of the result the best step, and the warnings that `warnings_of` has not."""
    report = files.report()
    if report is None:
        return None
    warnings = [text for text in report.get("warnings") or () if text not in state.warnings.values()]
    return {"best_step": report.get("best_step"), "warnings": warnings}


def _checkpoints(files: RunFiles, state: RunState) -> list[Json]:
    roles: dict[str, list[str]] = {}
    for role, directory in (
        ("current", state.checkpoint),
        ("best", state.best_checkpoint),
        *((role, each["directory"]) for role, each in state.kept.items() if role != "candidate"),
    ):
        if directory:
            roles.setdefault(directory, []).append(role)
    found: list[Json] = []
    for path in sorted((files.path / "checkpoints").glob("step-*")):
        name = f"checkpoints/{path.name}"
        step = path.name.removeprefix("step-")
        size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
        number = int(step) if step.isdecimal() else None
        found.append({"directory": name, "step": number, "bytes": size, "roles": roles.get(name, [])})
    return found
