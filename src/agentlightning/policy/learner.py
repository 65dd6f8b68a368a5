"""The weights of a training run, as its algorithm updates them: one policy, behind the gate that holds calls back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import AgentEngines
from agentlightning.policy.base import (
    UPDATE,
    Columns,
    Metrics,
    Policy,
    ScoreColumn,
    SeparatePolicy,
    UpdateOptions,
    capabilities_of,
)
from agentlightning.trajectory import TokenTree, TrainingSample, Trajectory

# -- versions --------------------------------------------------------------------------------------------------------

# The age of tokens in updates, across the resumes of a run.
#
# Each update raises the version of the weights by one, and so does loading a checkpoint, which changes nothing that was
# learned. A run therefore records at each resume which version was saved and which one its weights have since, and ages
# are counted in updates: tokens that a killed process sampled with the weights of the checkpoint have age 0.

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
    ages = (
        abs(updates_of(by_model.get(call.model or "", version), resumes) - updates_of(sampled, resumes))
        for call in trajectory.transitions
        for sampled in [each for each, _ in call.versions] or [call.policy_version]
        if sampled is not None
    )
    return max(ages, default=0)


@dataclass(frozen=True, slots=True)
class Learner:
    """The weights that an algorithm trains. It reads them here; `Training.update` changes them."""

    policy: Policy
    updating: Callable[[], AbstractAsyncContextManager[bool]]
    """Holds model calls back while its body changes the weights; yields whether some continue across the change."""
    token_budget: int
    """Tokens of a micro-batch, unless the update says otherwise."""
    resumes: Resumes = ()
    """Of the run: loading a checkpoint raises the version, and is no update."""
    publish_weights: Callable[[], Awaitable[Metrics]] | None = None
    """Publishes each version where other hosts pull it; returns what that cost."""

    @property
    def chat(self) -> ChatFormat:
        """The chat template and tokenizer of the model."""
        return self.policy.chat

    @property
    def context_length(self) -> int:
        """The number of tokens the model can hold, prompt and answer together."""
        return self.policy.context_length

    @property
    def policy_version(self) -> int:
        """The version of the present weights. It only grows."""
        return self.policy.policy_version

    @property
    def starts_at_base(self) -> bool:
        """See `Capabilities.starts_at_base`."""
        return capabilities_of(self.policy).starts_at_base

    @property
    def versions(self) -> Mapping[str, int]:
        """The versions of the weights that may answer, by model name."""
        policy = self.policy
        return policy.versions if isinstance(policy, AgentEngines) else {policy.model: policy.policy_version}

    def updates_of(self, version: int) -> int:
        """The number of updates behind weights of this version: loading a checkpoint raises it and is none."""
        return updates_of(version, self.resumes)

    def version_of(self, adapter: str | None) -> int:
        """The version of what samples of this adapter train."""
        model = self.policy.model if adapter is None else f"{self.policy.model}:{adapter}"
        return self.versions.get(model, self.policy_version)

    async def update(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        """`Policy.train`. The metrics also have the age of the samples and the seconds until calls had finished. A
        policy that trains other weights than those that sample holds calls back only while these are replaced."""
        own = dict(await asyncio.to_thread(staleness, samples, self.version_of, self.resumes))
        options = replace(options, token_budget=options.token_budget or self.token_budget)
        metrics: dict[str, float] = {}
        apart = cast(SeparatePolicy, self.policy) if capabilities_of(self.policy).separate else None
        if apart is not None:
            metrics |= await apart.train_apart(samples, options)
        requested = time.monotonic()
        async with self.updating() as in_flight:
            own["drain_seconds"] = time.monotonic() - requested
            if apart is not None:
                metrics |= await apart.publish_update(in_flight=in_flight)
            else:
                metrics |= await self.policy.train(samples, options, in_flight=in_flight)
        return {**metrics, **own, **await self.publish()}

    async def publish(self) -> Metrics:
        """Publish the weights where other hosts pull them, if the run has such a place; returns what that cost. Raises
        WeightStoreError."""
        return {} if self.publish_weights is None else await self.publish_weights()

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """See `Policy.score`."""
        return await self.policy.score(trees, what, reference=reference, adapter=adapter)

    async def save(self, directory: Path) -> None:
        """Write the present weights to a directory that transformers loads."""
        await self.policy.save(directory)

    async def rollback(self, directory: Path) -> None:
        async with self.updating() as in_flight:
            await self.policy.load(directory, in_flight=in_flight)
        await self.publish()


def staleness(
    samples: Sequence[TrainingSample], version_of: Callable[[str | None], int], resumes: Resumes = ()
) -> Metrics:
    """The number of updates between the weights that sampled a token and those that are about to learn from it, whose
    version `version_of` gives by the adapter of a sample.

    `staleness` is the mean over trained tokens, `staleness_max` the maximum; an answer sampled across an update counts
    token by token. Empty where no token has a version.
    """
    ages = [
        (updates_of(version_of(sample.adapter), resumes) - updates_of(node.policy_version, resumes), count)
        for sample in samples
        for node, weights in zip(sample.tree.nodes, sample.weights, strict=True)
        if node.policy_version is not None and (count := int((weights != 0).sum()))
    ]
    tokens = sum(count for _, count in ages)
    if not tokens:
        return {}
    mean = sum(age * count for age, count in ages) / tokens
    return {"staleness": mean, "staleness_max": float(max(age for age, _ in ages))}
