"""All signs of a run: those of its present state, and since which step each of its history was seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning.training.health import collapse, failures, guard, leak, outputs, rewards, updates
from agentlightning.training.health.sign import Detector, Records, Sign
from agentlightning.training.health.step_record import StepRecord

DETECTORS: Final[tuple[Detector, ...]] = (
    rewards.without_spread,
    collapse.echo_trap,
    updates.broken,
    updates.skipped,
    failures.timed_out,
    failures.left_out,
    rewards.identical_outputs,
    rewards.reward_hacking,
    rewards.outliers,
    guard.out_of_range,
    guard.missing,
    guard.drift,
    guard.disagreement,
    updates.entropy_gone,
    updates.gradient_spikes,
    updates.divergence,
    updates.clipping,
    updates.mismatch,
    updates.staleness,
    leak.answer_given_away,
    outputs.truncation,
    outputs.length,
    outputs.repetition,
    outputs.common_output,
)
"""Each judges steps as of the last of them."""

FIRST_STEPS: Final = 50
LAST_STEPS: Final = 450
"""Of a longer run, these many of its first and last steps are judged: the work of a step stays the same."""


@dataclass(frozen=True, slots=True)
class SignHistory:
    """One kind of sign in the history of a run."""

    sign: Sign
    """As it was last seen."""
    since: int
    """The step at which it was first seen."""
    until: int
    """The last such step."""
    count: int
    """The number of steps at which it was seen."""


def signs_of(records: Records) -> list[Sign]:
    """What is wrong as of the last of these steps. Steps before a change of what rewards mean, of an earlier stage, or
    from before a return to an earlier checkpoint are not judged together with it."""
    present = comparable(records)
    if len(present) > FIRST_STEPS + LAST_STEPS:
        present = [*present[:FIRST_STEPS], *present[-LAST_STEPS:]]
    return [sign for detector in DETECTORS if (sign := detector(present)) is not None] if present else []


def comparable(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The last steps that come from one course of the weights and one meaning of the rewards."""
    start = len(records) - 1
    while start > 0 and _continues(records[start - 1], records[start]):
        start -= 1
    return records[max(0, start) :]


def _continues(before: StepRecord, record: StepRecord) -> bool:
    same = (before.revision, before.stage) == (record.revision, record.stage)
    return same and not before.is_last_of_history


def sign_history(records: Sequence[StepRecord]) -> list[SignHistory]:
    """Every kind of sign that was seen, in order of its first step."""
    found: dict[str, SignHistory] = {}
    for part in _parts(records):
        for end in range(1, len(part) + 1):
            step = part[end - 1].step
            for sign in signs_of(part[:end]):
                known = found.get(sign.name)
                since, count = (step, 0) if known is None else (known.since, known.count)
                found[sign.name] = SignHistory(sign, since, step, count + 1)
    return sorted(found.values(), key=lambda each: each.since)


def _parts(records: Sequence[StepRecord]) -> Iterator[Sequence[StepRecord]]:
    """The steps, divided where they cannot be judged together."""
    rest = records
    parts: list[Sequence[StepRecord]] = []
    while rest:
        parts.append(comparable(rest))
        rest = rest[: len(rest) - len(parts[-1])]
    return reversed(parts)


def collapses(signs: Iterable[Sign]) -> list[Sign]:
    """Those of a policy that is breaking."""
    return [sign for sign in signs if sign.is_collapse]
