"""What each stage of a run of several algorithms has gained, and at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.evaluation.evaluation import Evaluation, gain_of
from agentlightning.evaluation.intervals import Gain
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.report.cost import Cost, cost_of_steps


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage has gained.

    >>> agl.StageResult("apo", first_step=0, steps=30, rollouts=200).cost.search_tokens
    0
    """

    name: str
    """That of its algorithm."""
    first_step: int
    """The steps of the run before it."""
    steps: int
    rollouts: int
    held_out: Mapping[str, Gain] = field(default_factory=dict[str, Gain])
    """Held-out reward before and after it by sampling mode, with the 95% interval of the paired gain. Empty where it
    was not measured: rewards changed their meaning after it."""
    cost: Cost = field(default_factory=Cost)
    """Without the calls to providers, which are counted for the whole run."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "first_step": self.first_step,
            "steps": self.steps,
            "rollouts": self.rollouts,
            "held_out": {mode: gain_as_json(gain) for mode, gain in self.held_out.items()},
            "cost": self.cost.as_json(),
        }


def gain_as_json(gain: Gain) -> dict[str, Any]:
    return {
        "before": gain.before,
        "after": gain.after,
        "gain": gain.gain,
        "interval": list(gain.interval),
        "tasks": gain.tasks,
        "missing_before": gain.missing_before,
        "missing_after": gain.missing_after,
    }


def stage_results(state: RunState, lines: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> tuple[StageResult, ...]:
    """The stages of a finished run; none for a run of one algorithm. `lines`: the metrics of its steps."""
    records = state.stages
    ends = [*(each["first_step"] for each in records[1:]), state.step]
    rollouts = [*(each["rollouts"] for each in records[1:]), state.rollouts]
    measured = ["before", *(f"stage-{place}" for place in range(len(records) - 1)), "after"]
    return tuple(
        StageResult(
            record["name"],
            record["first_step"],
            ends[place] - record["first_step"],
            rollouts[place] - record["rollouts"],
            _gains(state, measured[place], measured[place + 1], modes),
            cost_of_steps([line for line in lines if line.get("stage") == place + 1]),
        )
        for place, record in enumerate(records)
    )


def _gains(state: RunState, before: str, after: str, modes: Sequence[str]) -> dict[str, Gain]:
    found: dict[str, Gain] = {}
    for mode in modes:
        names = [f"{when}-{mode}" for when in (before, after)]
        if all(state.evaluations.get(name) for name in names):
            first, second = (Evaluation(tuple(state.evaluations[name])) for name in names)
            found[mode] = gain_of(first, second)
    return found
