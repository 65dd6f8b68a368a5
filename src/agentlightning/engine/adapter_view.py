"""Engines that answer some agents with weights of their own: adapters over one model.

The adapters of an engine share its queue, batches and updates. What differs is the model name they are requested by,
the version of their weights, and what samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import ConstraintKind, Engine, OnTokens, Sample, SamplingParams
from agentlightning.util.settings import Section


class AdapterTable(Section):
    """Which adapters answer which agents. None as an adapter stands for the weights below them."""

    own: str | None = None
    """The adapter of the engine itself."""
    views: Mapping[str, str | None] = {}
    """Model name -> adapter, of what answers single agents."""
    agents: Mapping[str, str] = {}
    """Agent -> model name: the engine's, or one of `views`."""
    others: str = ""
    """The model name for all other agents."""


class AgentEngines:
    """The part of an `Engine` that answers some agents with other weights than its own, as its `table` says."""

    model: str
    table = AdapterTable()

    def version_of(self, adapter: str | None) -> int:
        """The version of an adapter's weights; see `Engine.policy_version`, which is that of the newest."""
        raise NotImplementedError

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """`sample` from an adapter."""
        raise NotImplementedError

    @cached_property
    def views(self) -> Mapping[str, Engine]:
        """The engines of these weights, by the model names that agents may request them by."""
        return {model: AdapterView(self, model, adapter) for model, adapter in self.table.views.items()}

    @property
    def versions(self) -> Mapping[str, int]:
        """The version of the weights behind each of these names, and behind its own."""
        adapters = {self.model: self.table.own, **self.table.views}
        return {model: self.version_of(adapter) for model, adapter in adapters.items()}

    def for_agent(self, agent: str | None) -> Engine:
        """What answers the calls of an agent: this engine, or one of `views`."""
        return self.views.get(self.table.agents.get(agent or "", self.table.others), cast("Engine", self))

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`."""
        return await self.sample_adapter(self.table.own, prompt_token_ids, params, on_tokens, affinity=affinity)


class EngineWrapper:
    """What an engine that samples through another has in common with it."""

    @property
    def engine(self) -> Engine:
        """The other one."""
        raise NotImplementedError

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    @property
    def chat(self) -> ChatFormat:
        return self.engine.chat

    @property
    def supported_params(self) -> frozenset[str]:
        return self.engine.supported_params

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return await self.engine.can_enforce(text, kind)


@dataclass(frozen=True, slots=True)
class AdapterView(EngineWrapper):
    """An `Engine` that samples from one adapter of another."""

    agents: AgentEngines
    model: str
    adapter: str | None

    @property
    def engine(self) -> Engine:
        return cast("Engine", self.agents)

    @property
    def policy_version(self) -> int:
        return self.agents.version_of(self.adapter)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`."""
        return await self.agents.sample_adapter(self.adapter, prompt_token_ids, params, on_tokens, affinity=affinity)
