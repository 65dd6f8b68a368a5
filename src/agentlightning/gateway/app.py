"""The gateway: the OpenAI and Anthropic API that agents call.

Attributes each call to an attempt, samples or forwards it, records it and replies. Agents call it over HTTP; the
trainer calls `pause`, `drain` and `resume`. This module wires the parts; `endpoints` handles the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from os import PathLike

from starlette.routing import Route

from agentlightning.engine.adapter_view import AgentEngines
from agentlightning.engine.base import Engine
from agentlightning.gateway.callers.agents import AgentMatcher, AgentRule
from agentlightning.gateway.callers.attempts import CHECK_SECONDS, AttemptTable
from agentlightning.gateway.callers.attribution import MODE_TEMPERATURES, Attribution
from agentlightning.gateway.callers.on_policy import OnPolicySampling
from agentlightning.gateway.concurrency import ConcurrencyLimit
from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.endpoints import Endpoints
from agentlightning.gateway.forwarding.service import ForwardingService
from agentlightning.gateway.local.conversation import Conversations
from agentlightning.gateway.local.service import LocalService, LocalSettings
from agentlightning.gateway.local.update_gate import UpdateGates
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.models_api import ModelsEndpoint
from agentlightning.gateway.routing import CallResolver, Router
from agentlightning.gateway.upstream.budget import Budgets
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.store.base import LightningStoreBase
from agentlightning.transport import Transport
from agentlightning.transport.connector import ConnectOptions


class Gateway:
    """Serves model calls, and holds them back during weight updates.

    `engines` maps model names to engines. A call belongs to the attempt in its URL or in its key, which is signed with
    `secret`; a call without an attempt is rejected unless `allow_unattributed`. A URL is enough unless `require_key`,
    which is for servers that strangers can reach. `config` has the routes to providers and the budget; `budget_file`
    stores what was spent, unless the budget names a file. `default_model` serves requests without a model and, with
    `accept_any_model`, those for an unknown one, unless `config` says otherwise. Calls above `max_concurrency` wait.
    Every `check_seconds` the store is asked which attempts have ended. `agents` are rules that recognize agents;
    `mode_temperatures` are the temperatures for URLs of version 1.0, unless the trainer sets one.
    """

    def __init__(
        self,
        store: LightningStoreBase,
        engines: Mapping[str, Engine],
        *,
        secret: str,
        config: GatewayConfig | None = None,
        budget_file: str | PathLike[str] | None = None,
        default_model: str | None = None,
        accept_any_model: bool | None = None,
        require_key: bool = False,
        allow_unattributed: bool = False,
        max_body_bytes: int = 32 * 1024 * 1024,
        max_concurrency: int = 4096,
        check_seconds: float = CHECK_SECONDS,
        agents: Sequence[AgentRule] = (),
        mode_temperatures: Mapping[str, float] = MODE_TEMPERATURES,
    ) -> None:
        config = config or GatewayConfig()
        self._store = store
        self.counters = Counters()
        self.conversations = Conversations()
        self.kept = ResponseStore()
        self.gates = UpdateGates()
        """One gate for each engine, closed while its weights change."""
        self._transports: dict[ConnectOptions, Transport] = {}
        self.budgets = Budgets(config.budget, store, budget_file)
        self.providers = self._open_pools(config)
        self.router = Router(
            engines,
            config.routes,
            self.providers,
            default_model=config.default_model or default_model,
            accept_any_model=bool(accept_any_model if config.accept_any_model is None else config.accept_any_model),
        )
        self.attempts = AttemptTable(store, self.forget, check_seconds=check_seconds)
        self.attribution = Attribution(
            self.attempts,
            secret,
            require_key=require_key,
            allow_unattributed=allow_unattributed,
            mode_temperatures=mode_temperatures,
        )
        self._resolver = CallResolver(AgentMatcher((*config.agents, *agents)), self.router)
        self._forwarder, self._local = self._services(config)
        self._limit = ConcurrencyLimit(max_concurrency)
        self._endpoints = self._make_endpoints(max_body_bytes)

    def _open_pools(self, config: GatewayConfig) -> dict[str, ServerPool]:
        return {
            provider.name: ServerPool(provider, partial(self._open_transport, provider.connect_options()), self.budgets)
            for provider in config.providers
        }

    def _services(self, config: GatewayConfig) -> tuple[ForwardingService, LocalService]:
        """What serves the calls of providers, and of our own engines."""
        on_policy = OnPolicySampling(self.counters)
        forwarding = ForwardingService(self._store, self.attempts, self.counters, on_policy, self.kept)
        local = LocalService(
            store=self._store,
            conversations=self.conversations,
            responses=self.kept,
            gates=self.gates,
            attempts=self.attempts,
            counters=self.counters,
            on_policy=on_policy,
            settings=LocalSettings(config.structured_output, config.record_top_logprobs),
        )
        return forwarding, local

    def _make_endpoints(self, max_body_bytes: int) -> Endpoints:
        return Endpoints(
            attribution=self.attribution,
            resolver=self._resolver,
            forwarding=self._forwarder,
            local=self._local,
            models=ModelsEndpoint(self.router, self.attribution.check_key),
            responses=self.kept,
            providers=self.providers,
            store=self._store,
            counters=self.counters,
            attempts=self.attempts,
            limit=self._limit,
            max_body_bytes=max_body_bytes,
        )

    # -- pause and resume ------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self.gates.closed

    def pause(self) -> None:
        """Make new calls of every engine wait. Calls in progress continue."""
        self.gates.close()

    async def drain(self, timeout: float | None = None) -> None:
        """Pause, and wait until all calls in progress are recorded. Raises TimeoutError, and stays paused."""
        await self.gates.drain(timeout)

    def resume(self) -> None:
        """Let waiting calls continue."""
        self.gates.open()

    # -- training runs elsewhere -----------------------------------------------------------------------------------

    def add_policy(self, model: str, engine: Engine, settings: LocalSettings) -> None:
        """See `Router.add_policy`; the settings are those of the run."""
        self.router.add_policy(model, engine)
        for name in (model, *(engine.views if isinstance(engine, AgentEngines) else ())):
            self._local.settings_of[name] = settings

    def remove_policy(self, model: str) -> None:
        """See `Router.remove_policy`."""
        self.router.remove_policy(model)
        for name in self._local.settings_of.keys() - set(self.router.models):
            del self._local.settings_of[name]

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        """Drop what is cached of an attempt that has ended."""
        self.conversations.forget((rollout_id, attempt_id))
        self.kept.forget((rollout_id, attempt_id))
        self.budgets.forget(rollout_id)

    def metrics(self) -> dict[str, int | float]:
        """Counters by name."""
        counts = {field.name: getattr(self.counters, field.name) for field in fields(self.counters)}
        providers = self.providers.values()
        return {name: value for name, value in counts.items() if isinstance(value, int)} | {
            "provider_retries": sum(pool.num_retries for pool in providers),
            "provider_dollars": sum(pool.dollars for pool in providers),
            "over_budget": self.budgets.num_rejected,
            "attribution_conflicts": self.attribution.conflicts,
            "attribution_refused": self.attribution.refused,
        }

    async def close(self) -> None:
        """End the calls in progress and close the connections to providers. A later call opens them again."""
        await self.attempts.close()
        for pool in self.providers.values():
            await pool.close()
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.close()
        self.budgets.close()

    def _open_transport(self, options: ConnectOptions) -> Transport:
        """One transport for all providers with the same connect options."""
        if (transport := self._transports.get(options)) is None:
            transport = self._transports[options] = Transport(options)
        return transport

    def routes(self) -> list[Route]:
        """The routes of the gateway, for a Starlette application."""
        return self._endpoints.routes()
