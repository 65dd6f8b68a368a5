"""What a run does when its policy collapses: warn, stop, or return to a healthy checkpoint with a lower learning rate.

A checkpoint is *healthy* once a number of further steps have shown no collapse, because its signs come some steps after
its cause. Two are kept: the healthy one, and the next candidate. A run that stops has returned to the healthy one, too,
so that it can be resumed; both are bounded in number by `run.max_rollbacks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentlightning.config import RunConfig
from agentlightning.errors import TrainingStopped
from agentlightning.training.health.signs import Sign
from agentlightning.training.persistence.checkpoints import Checkpoints
from agentlightning.training.persistence.run_dir import KeptCheckpoint, RunState

HEALTHY_STEPS: Final = 5
"""Steps without a sign of collapse after which a checkpoint is healthy: `collapse.LAST` and one."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """What was done about a collapse."""

    sign: Sign
    returned_to: int
    """The step whose weights the run has again."""
    stops: bool

    def metrics(self, state: RunState) -> dict[str, float]:
        """What the line of the step gains."""
        did = "stopped" if self.stops else "rolled_back"
        return {did: 1.0, "returned_to_step": float(self.returned_to), "lr_factor": state.lr_factor}


@dataclass(slots=True)
class Recovery:
    """Keeps healthy checkpoints, and returns to them."""

    config: RunConfig
    state: RunState
    checkpoints: Checkpoints

    @property
    def keeps_checkpoints(self) -> bool:
        return self.config.on_collapse != "warn"

    async def begin(self) -> None:
        """Before the first step of a process: there is always a checkpoint to return to."""
        if self.keeps_checkpoints and self.state.healthy is None:
            self.keep_only(await self.checkpoints.write(self.state.step))

    def keep_only(self, directory: str) -> None:
        """Return to no checkpoint before this one, with which a stage begins."""
        if self.keeps_checkpoints:
            self.state.healthy = self.state.candidate = self._kept(directory)

    async def react(self, signs: Sequence[Sign]) -> Reaction | None:
        """Act on a collapse, if these are signs of one and the run is to act."""
        found = next((sign for sign in signs if sign.is_collapse), None)
        healthy = self.state.healthy
        if found is None or not self.keeps_checkpoints or healthy is None:
            return None
        stops = self.config.on_collapse == "stop" or self.state.rollbacks >= self.config.max_rollbacks
        await self.checkpoints.rollback(healthy["directory"], healthy["version"])
        if not stops:
            self.state.rollbacks += 1
            self.state.lr_factor *= self.config.rollback_lr_factor
        self.state.candidate = healthy
        return Reaction(found, healthy["step"], stops)

    def keep(self) -> None:
        """After a step without collapse whose checkpoint was written: it is the next candidate when due."""
        state = self.state
        if not self.keeps_checkpoints or state.checkpoint is None or state.candidate is None:
            return
        if state.step - state.candidate["step"] >= HEALTHY_STEPS:
            state.healthy, state.candidate = state.candidate, self._kept(state.checkpoint)

    def _kept(self, directory: str) -> KeptCheckpoint:
        learner = self.checkpoints.learner
        version = None if learner is None else learner.policy_version
        return {"directory": directory, "step": self.state.step, "version": version}

    def describe(self, reaction: Reaction) -> str:
        """What was done, for the user."""
        back = f"returned to the weights of step {reaction.returned_to}"
        if not reaction.stops:
            return (
                f"step {self.state.step}: {back}, with {self.state.lr_factor:.3g} of the learning rate"
                f" (rollback {self.state.rollbacks} of {self.config.max_rollbacks}), because {reaction.sign.what}"
            )
        return f"step {self.state.step}: {reaction.sign}.\nThe run has {back} and stopped"

    def stopped(self, reaction: Reaction, run_dir: Path) -> TrainingStopped:
        """The error that ends the run."""
        why = f'run.on_collapse = "{self.config.on_collapse}"'
        if self.config.on_collapse == "rollback":
            why += f", after {self.state.rollbacks} rollbacks (run.max_rollbacks)"
        return TrainingStopped(
            f"{self.describe(reaction)}: {why}. Continue with a lower learning rate:"
            f" agl train --resume {run_dir} algorithm.optimizer.lr=..."
        )
