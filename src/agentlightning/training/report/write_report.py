"""The report of a finished run: the artefact, the reward curve and report.json, and what `Trainer.fit` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

import orjson

from agentlightning.evaluation.evaluation import Evaluation, gain_of
from agentlightning.resources import prompts_in
from agentlightning.training.health.examination import closing_warnings
from agentlightning.training.persistence.run_dir import write_atomically
from agentlightning.training.report.result import TrainingResult, cost_of_steps, stage_results, with_providers
from agentlightning.training.report.reward_curve import draw_curve
from agentlightning.training.run import TrainingRun


async def write_report(
    run: TrainingRun, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]
) -> TrainingResult:
    """Write the report of a run to its directory. The curve is left out where matplotlib is not installed, which runs
    without a model do not need."""
    gains = {mode: gain_of(before[mode], after[mode]) for mode in before if before[mode].rewards}
    directory = run.account.run_dir.path
    checkpoint, curve = directory / "checkpoint", directory / "curve.png"
    await run.checkpoints.export(checkpoint)
    await asyncio.to_thread(run.account.curve.close)
    if run.learner is not None or find_spec("matplotlib") is not None:
        measured = {mode: gain for mode, gain in gains.items() if gain.tasks}
        draw_curve(run.account.run_dir.read_metrics(), measured, curve)
    run.account.write_state()
    state, lines = run.state, run.account.run_dir.read_metrics()
    cost = cost_of_steps(lines)
    if run.uses_providers:
        cost = await with_providers(cost, run.account.collector.store, state.run_id)
    result = TrainingResult(
        held_out=gains,
        missing=dict(state.reasons),
        rollouts=state.rollouts,
        failed_rollouts=state.failed_rollouts,
        rejected_rollouts=dict(state.rejected),
        skipped_groups=state.skipped_groups,
        warnings=(*state.warnings.values(), *closing_warnings(run.account.records, gains).values()),
        warning_counts=dict(state.warning_counts),
        rollbacks=state.rollbacks,
        gate_rejections=state.gate_rejections,
        steps=state.step,
        best_step=state.best_step,
        seconds=state.seconds,
        checkpoint=checkpoint,
        curve=curve if curve.exists() else None,
        run_dir=directory,
        start_prompts=run.start_prompts,
        prompts=prompts_in(run.resources),
        stages=stage_results(state, lines, list(gains)),
        cost=cost,
        recorded=None if run.recorded is None else run.recorded.result(lines),
        gateways=None if run.gateways is None else await run.gateways(),
    )
    if run.account.tracking is not None:
        failures = await asyncio.to_thread(run.account.tracking.result, state.step, result.as_json(), curve)
        new = {each for kind, each in run.account.tracking.warnings().items() if kind not in state.warnings}
        result = replace(result, tracker_failures=failures, warnings=(*result.warnings, *sorted(new)))
    write_atomically(directory / "report.json", orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2))
    return result
