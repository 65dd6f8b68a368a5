"""One adapter of an engine that has several, as an engine of its own.

The adapters of an engine share its queue, batches and updates. What differs is the model name they are requested by,
the version of their weights, and what samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import ConstraintKind, Engine, OnTokens, Sample, SamplingParams


class AdapterSampler(Engine, Protocol):
    """An engine with adapters. None stands for the weights below them."""

    def version_of(self, adapter: str | None) -> int:
        """The version of an adapter's weights; see `Engine.policy_version`."""
        ...

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """`Engine.sample` from an adapter."""
        ...


@runtime_checkable
class AgentEngines(Protocol):
    """An engine that answers some agents with other weights than its own."""

    @property
    def views(self) -> Mapping[str, Engine]:
        """The engines of these weights, by the model names that agents may request them by."""
        ...

    @property
    def versions(self) -> Mapping[str, int]:
        """The version of the weights behind each of these names, and behind its own. Its `policy_version` is that of
        the newest."""
        ...

    def for_agent(self, agent: str | None) -> Engine:
        """What answers the calls of an agent: this engine, or one of `views`."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An `Engine` that samples from one adapter of another."""

    engine: AdapterSampler
    model: str
    adapter: str | None

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    @property
    def chat(self) -> ChatFormat:
        return self.engine.chat

    @property
    def policy_version(self) -> int:
        return self.engine.version_of(self.adapter)

    @property
    def supported_params(self) -> frozenset[str]:
        return self.engine.supported_params

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return await self.engine.can_enforce(text, kind)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`."""
        return await self.engine.sample_adapter(self.adapter, prompt_token_ids, params, on_tokens, affinity=affinity)
