"""The audit log: for every version of weights and prompts, what it was learned from, by what, and how it scored.

`audit.jsonl` in the run directory has a line for each. What the promotion gate decided is in the store as well, as a
finished rollout `RUN-audit-STEP` whose input is the line and whose `resources_id` names the version it is about.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import orjson

from agentlightning.errors import ConfigError, ConflictError
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.persistence.run_dir import RunDir, RunState

AUDIT_FILE: Final = "audit.jsonl"
Action = Literal["learned", "promoted", "rejected"]


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One event in the life of a version.

    >>> agl.AuditRecord("learned", step=3, version=3, algorithm="lightning_rl", time=0.0).rollouts
    ()
    """

    action: Action
    """learned: it was made by a step; promoted, rejected: what the promotion gate decided."""
    step: int
    """The step after which it was present."""
    version: int | None
    """Its policy_version. None: the run trains no weights."""
    algorithm: str
    time: float
    """Seconds since 1970."""
    rollouts: tuple[str, ...] = ()
    """The rollouts that the step was given to learn from."""
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rewards of the step, of its validation, or of the guard set."""
    reason: str = ""
    """Why it was promoted or rejected."""
    resources: Mapping[str, Any] | None = None
    """The prompts and models beside the policy, where the algorithm has published some."""
    resources_id: str | None = None
    """Under which the store has the version."""
    returned_to: int | None = None
    """The step of the version that a rejected one was replaced by."""


@dataclass(frozen=True, slots=True)
class AuditLog:
    """Writes the audit log of a run."""

    run_dir: RunDir
    state: RunState
    store: LightningStoreBase
    algorithm: str

    def write(self, record: AuditRecord) -> None:
        with (self.run_dir.path / AUDIT_FILE).open("ab") as file:
            file.write(orjson.dumps(msgspec.to_builtins(record)) + b"\n")

    def learned(self, version: int | None, rollouts: Sequence[str], line: Mapping[str, Any], resources: Any) -> None:
        """A step is finished."""
        scores = {
            name: float(value)
            for name, value in line.items()
            if name == "reward" or name.startswith(("validation_", "reward_of_"))
            if isinstance(value, int | float)
        }
        step = self.state.step
        self.write(
            AuditRecord(
                "learned", step, version, self.algorithm, time.time(), tuple(rollouts), scores, resources=resources
            )
        )

    async def decided(self, record: AuditRecord) -> None:
        """The promotion gate has decided."""
        self.write(record)
        content = msgspec.to_builtins(record)
        name = f"{self.state.run_id}-audit-{record.step:06d}{self.state.suffix}"
        metadata = {"audit": record.action}
        try:
            rollout = await self.store.start_rollout(
                content, resources_id=record.resources_id, metadata=metadata, rollout_id=name, queue="audit"
            )
        except ConflictError:
            return  # the step was repeated after a crash
        await self.store.update_attempt(name, rollout.attempt.attempt_id, status="succeeded")


def read_audit(run_dir: str | Path) -> list[AuditRecord]:
    """The audit log of a run, in order. Of a step that was repeated after a crash, the last time counts.

    Raises ConfigError where there is no run, or its log cannot be read.

        >>> agl.read_audit("runs/first")[-1].action  # doctest: +SKIP
        'promoted'
    """
    path = Path(run_dir) / AUDIT_FILE
    if not (Path(run_dir) / "state.json").exists():
        raise ConfigError(f"{run_dir} holds no run: there is no state.json in it; give the directory of a run")
    if not path.exists():
        return []
    found: dict[tuple[int, str], AuditRecord] = {}
    for number, line in enumerate(path.read_bytes().rpartition(b"\n")[0].splitlines(), 1):
        try:
            record = msgspec.json.decode(line, type=AuditRecord)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} of {path} cannot be read: {error}; remove that line") from error
        key = (record.step, "learned" if record.action == "learned" else "decided")
        found.pop(key, None)
        found[key] = record
    return list(found.values())
