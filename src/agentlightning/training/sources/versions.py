"""The age of tokens in updates, across the resumes of a run.

Each update raises the version of the weights by one, and so does loading a checkpoint, which changes nothing that was
learned. A run therefore records at each resume which version was saved and which one its weights have since, and ages
are counted in updates: tokens that a killed process sampled with the weights of the checkpoint have age 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentlightning.trajectory import Trajectory, Transition

Resumes = Sequence[Sequence[int]]
"""(version that was saved, version of the same weights since) of each resume, in order."""


def updates_of(version: int, resumes: Resumes) -> int:
    """The number of updates behind weights of this version. Those of a process whose last steps were lost count on from
    its checkpoint, as the steps that repeat them do.

    >>> [updates_of(version, [(5, 8)]) for version in (5, 6, 8, 9)]
    [5, 6, 5, 6]
    """
    for saved, loaded in reversed(resumes):
        if version >= loaded:
            return version - loaded + updates_of(saved, [each for each in resumes if each[1] < loaded])
    return version


def age(
    trajectory: Trajectory, version: int, resumes: Resumes = (), by_model: Mapping[str, int] = MappingProxyType({})
) -> int:
    """The largest number of updates between the weights that sampled one of its tokens and the present ones: those of
    `by_model` for the model that answered, else of `version`. 0 where no token has a version."""

    def behind(call: Transition, sampled: int) -> int:
        return abs(updates_of(by_model.get(call.model or "", version), resumes) - updates_of(sampled, resumes))

    ages = (behind(call, each) for call in trajectory.transitions for each in _versions(call))
    return max(ages, default=0)


def _versions(call: Transition) -> list[int]:
    found = [each for each, _ in call.versions] or [call.policy_version]
    return [version for version in found if version is not None]
