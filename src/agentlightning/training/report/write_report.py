"""The report of a finished run: the artefact and report.json, and what `Trainer.fit` returns."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from agentlightning.evaluation.evaluation import Evaluation, gain_of
from agentlightning.resources import prompts_in
from agentlightning.training.health.examination import closing_warnings
from agentlightning.training.persistence.run_dir import write_atomically
from agentlightning.training.report.result import TrainingResult, cost_of_steps, stage_results, with_providers
from agentlightning.training.run import TrainingRun
from agentlightning.util.plugins import calls_of


async def write_report(
    run: TrainingRun, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]
) -> TrainingResult:
    """Write the report of a run to its directory."""
    gains = {mode: gain_of(before[mode], after[mode]) for mode in before if before[mode].rewards}
    directory = run.account.run_dir.path
    checkpoint = directory / "checkpoint"
    await run.checkpoints.export(checkpoint)
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
        gate_rejections=state.of("gate").get("gate_rejections", 0),
        steps=state.step,
        best_step=state.best_step,
        seconds=state.seconds,
        checkpoint=checkpoint,
        curve=None,
        run_dir=directory,
        start_prompts=run.start_prompts,
        prompts=prompts_in(run.resources),
        stages=stage_results(state, lines, list(gains)),
        cost=cost,
        recorded=None if run.recorded is None else run.recorded.result(lines),
        gateways=None if run.gateways is None else await run.gateways(),
    )
    for callback in run.account.callbacks:
        with calls_of(type(callback), "callback"):
            result = await callback.on_end(result)
    write_atomically(directory / "report.json", orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2))
    return result
