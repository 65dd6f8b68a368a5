"""What a run does with its signs of trouble: it warns of each, and when its policy collapses it may stop, or return to
a healthy checkpoint with a lower learning rate.

A checkpoint is *healthy* once a number of further steps have shown no collapse, because its signs come some steps after
its cause. Two are kept: the healthy one, and the next candidate. A run that stops has returned to the healthy one, too,
so that it can be resumed; both are bounded in number by `run.max_rollbacks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from agentlightning.config import RunConfig
from agentlightning.errors import TrainingStopped
from agentlightning.policy.base import UpdateOptions
from agentlightning.training.account import RunAccount
from agentlightning.training.callbacks import Callback, FinishedStep
from agentlightning.training.health.signs import signs_of
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.checkpoints import Checkpoints
from agentlightning.training.persistence.run_dir import KeptCheckpoint

HEALTHY_STEPS: Final = 5
"""Steps without a sign of collapse after which a checkpoint is healthy: `signs.LAST` and one."""


@dataclass(slots=True)
class HealthState:
    healthy: KeptCheckpoint | None = None
    """The newest checkpoint known to be from before any collapse."""
    candidate: KeptCheckpoint | None = None
    """The one that is to follow it."""
    rollbacks: int = 0
    """The number of returns to a healthy checkpoint."""
    lr_factor: float = 1.0
    """The factor of the learning rate after these."""


class Health(Callback[HealthState]):
    """Judges each step together with those before it, and acts on a collapse as `run.on_collapse` says."""

    name = "health"
    state_class = HealthState

    def __init__(
        self, config: RunConfig, account: RunAccount, checkpoints: Checkpoints, *, judges: bool = True
    ) -> None:
        """`judges`: whether the run has rollouts of the present weights, which is what signs assume."""
        self.config, self.account, self.checkpoints, self.judges = config, account, checkpoints, judges
        self._did = ""
        """What was done about a collapse in the present step."""

    async def on_start(self) -> None:
        """There is always a checkpoint to return to."""
        if self.config.on_collapse != "warn" and self.state.healthy is None:
            self.state.healthy = self.state.candidate = await self.checkpoints.keep()

    def before_update(self, options: UpdateOptions) -> UpdateOptions:
        return replace(options, lr_factor=options.lr_factor * self.state.lr_factor)

    async def on_step(self, step: FinishedStep) -> Mapping[str, float] | None:
        if not self.judges:
            return None
        state, run = self.state, self.account.state
        signs = signs_of([*self.account.records, StepRecord.read(step.line)])
        self.account.warn({sign.name: str(sign) for sign in signs})
        sign, healthy = next((sign for sign in signs if sign.is_collapse), None), state.healthy
        if sign is None or healthy is None or self.config.on_collapse == "warn":
            return None
        stops = self.config.on_collapse == "stop" or state.rollbacks >= self.config.max_rollbacks
        await self.checkpoints.rollback(healthy["directory"], healthy["version"])
        state.candidate, step.saves = healthy, True
        back = f"returned to the weights of step {healthy['step']}"
        self._did = f"step {run.step}: {sign}.\nThe run has {back} and stopped"
        if not stops:
            state.rollbacks += 1
            state.lr_factor *= self.config.rollback_lr_factor
            self._did = (
                f"step {run.step}: {back}, with {state.lr_factor:.3g} of the learning rate (rollback"
                f" {state.rollbacks} of {self.config.max_rollbacks}), because {sign.what}"
            )
        did = "stopped" if stops else "rolled_back"
        return {did: 1.0, "returned_to_step": float(healthy["step"]), "lr_factor": state.lr_factor}

    async def on_step_end(self, step: FinishedStep) -> None:
        did, self._did = self._did, ""
        if did and step.line.get("stopped"):
            why = f'run.on_collapse = "{self.config.on_collapse}"'
            if self.config.on_collapse == "rollback":
                why += f", after {self.state.rollbacks} rollbacks (run.max_rollbacks)"
            raise TrainingStopped(
                f"{did}: {why}. Continue with a lower learning rate:"
                f" agl train --resume {self.account.run_dir.path} algorithm.optimizer.lr=..."
            )
        if did:
            self.account.progress.note(did)

    async def on_checkpoint(self) -> None:
        """That of a step without collapse is the next candidate when due."""
        state, written = self.state, self.checkpoints.written
        if written is None or state.candidate is None:
            return
        if written["step"] - state.candidate["step"] >= HEALTHY_STEPS:
            state.healthy, state.candidate = state.candidate, written

    async def on_stage(self) -> None:
        """Return to no checkpoint before the one with which a stage begins."""
        if (written := self.checkpoints.written) is not None:
            self.return_to(written)

    def return_to(self, kept: KeptCheckpoint) -> None:
        """Return to no other checkpoint than this from now on, where one is kept at all."""
        if self.state.healthy is not None:
            self.state.healthy = self.state.candidate = kept
