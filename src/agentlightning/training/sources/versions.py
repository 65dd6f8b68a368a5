"""The age of tokens in updates, across the resumes of a run.

Each update raises the version of the weights by one, and so does loading a checkpoint, which changes nothing that was
learned. A run therefore records at each resume which version was saved and which one its weights have since, and ages
are counted in updates: tokens that a killed process sampled with the weights of the checkpoint have age 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.trajectory import Trajectory

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


def versions_of(trajectory: Trajectory) -> set[int]:
    """The versions of the weights that sampled its tokens, as far as they are known."""
    return {
        version
        for call in trajectory.transitions
        for version in ([each for each, _ in call.versions] or [call.policy_version])
        if version is not None
    }


def age(trajectory: Trajectory, version: int, resumes: Resumes = ()) -> int:
    """The largest number of updates between the weights that sampled one of its tokens and weights of `version`; 0
    where no token has a version."""
    present = updates_of(version, resumes)
    return max((abs(present - updates_of(each, resumes)) for each in versions_of(trajectory)), default=0)
