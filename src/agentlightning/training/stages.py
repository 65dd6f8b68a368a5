"""The stages of a run of several algorithms, as its state records them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentlightning.algorithms.training import Stage
from agentlightning.errors import ResumeError
from agentlightning.training.persistence.run_dir import RunState, StageRecord


def record_of(stage: Stage, state: RunState) -> StageRecord:
    """The record of a stage that begins now."""
    return {
        "name": stage.name,
        "first_step": state.step,
        "rollouts": state.rollouts,
        "learns_weights": stage.learns_weights,
        "settings": stage.settings,
    }


def check_order(stage: Stage, records: Sequence[StageRecord], warn: Callable[[str, str], None]) -> None:
    """Raises ResumeError where the run had another algorithm at the place of a stage. Warns of changed settings of one
    that is over."""
    if stage.number > len(records):
        return
    record = records[stage.place]
    if record["name"] != stage.name:
        raise ResumeError(
            f"stage {stage.number} of the run was {record['name']}, not {stage.name}; resume it with the stages it had"
        )
    if stage.number < len(records) and record["settings"] != stage.settings:
        warn(
            f"stage_{stage.number}_changed",
            f"the settings of stage {stage.number} ({stage.name}) were changed after it had ended, which changes"
            " nothing; start a new run for them",
        )


def updated_before(state: RunState) -> bool:
    """Whether the weights may have been updated: a step was done by something that learns them."""
    if not state.stages:
        return state.step > 0
    learning = next((each for each in state.stages if each["learns_weights"]), None)
    return learning is not None and state.step > learning["first_step"]
