"""The gateways that a run has joined: `agl serve` processes that answer its model calls (`engine.servers.joining`).

The trainer tells them which servers to sample from, holds calls back while it changes the weights, and then names the
weights that the servers have. It never sees a call: what was sampled is in the store.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import quote

from agentlightning.algorithms.base import Algorithm
from agentlightning.chat.hf import HFChatFormat
from agentlightning.chat.tokenizer_archive import pack_tokenizer, probe_tokens
from agentlightning.config import TrainConfig
from agentlightning.engine.servers.clients.http import JsonClient, ModelServerError
from agentlightning.engine.servers.joining import (
    BASE_PATH,
    COUNTS,
    RENEW_SECONDS,
    CheckRequest,
    JoinRequest,
    JoinStatus,
    Pause,
    RunRequest,
    ServedAdapter,
    StateRequest,
)
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.gateway.config import GatewayConfig
from agentlightning.policy.base import Policy, capabilities_of
from agentlightning.policy.served import ServedPolicy
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.transport import Transport
from agentlightning.util.event_loop import in_background

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.5
"""Between two attempts to reach a gateway."""
RENEWALS: Final = 6
"""Renewals in the time of a lease, at least."""
REQUEST_SECONDS: Final = 90.0
"""The longest a gateway may take to answer."""
_TO_SERVER: Final = "is for all callers of a server, and not for one run: put it into the file of `agl serve --routes`"
_TO_POLICY: Final = "is not needed, because all unknown model names lead to the policy of the run: leave it out"
SERVER_SETTINGS: Final = {
    **dict.fromkeys(("routes", "providers", "models", "agents", "budget"), _TO_SERVER),
    **dict.fromkeys(("default_model", "accept_any_model"), _TO_POLICY),
}
"""The settings of [gateway] that a run cannot bring to a server, and what to do instead. It brings all others."""


class _Gateway:
    """One gateway, and what it has done for the run."""

    def __init__(self, client: JsonClient, path: str) -> None:
        self.client, self._path = client, path
        self.joined = self.lost = False
        """Whether it serves the run; whether the run goes on without it."""
        self.last = JoinStatus()
        self._sending = asyncio.Lock()
        self.earlier = Counter[str]()
        """`joins`, and the counts of earlier processes at its address."""

    async def first(self, action: str, request: RunRequest) -> None:
        """A request at the start of a run. Raises ConfigError for a gateway that the run cannot join."""
        url = self.client.url
        try:
            await self.send(action, request)
        except ModelServerError as error:
            message = f"the run cannot join {url}"
            if error.status in (404, 405):
                message = f"{url} is no `agl serve` that training runs can join; install this version there"
            raise ConfigError(f"{message}: {error}") from error

    async def send(self, action: str, request: RunRequest) -> None:
        """Sets `last`, or `joined` to False where the gateway was started again or our lease has ended there. Raises
        ModelServerError, and ConfigError for the token."""
        try:
            async with self._sending:  # A later state must not arrive before an earlier one.
                answer = await self.client.post(self._path + action, request.model_dump())
        except ModelServerError as error:
            if error.status != 404 or not self.joined:
                raise
            self.joined = False
            return
        status = JoinStatus.model_validate(answer)
        if isinstance(request, JoinRequest):
            self.joined, self.lost = True, False
            self.earlier["joins"] += 1
        if status.counts["calls"] < self.last.counts["calls"]:
            self.earlier.update(self.last.counts)
        self.last = status


@asynccontextmanager
async def _gateways_of(
    config: TrainConfig, store: LightningStoreBase | None, policy: Policy
) -> AsyncGenerator[list[_Gateway]]:
    transport, path = Transport(), f"{BASE_PATH}/{quote(policy.model, safe='')}"
    token = store.token if isinstance(store, LightningStoreClient) else os.environ.get("AGL_TOKEN")
    clients = (
        JsonClient(transport, url, token, seconds=REQUEST_SECONDS, connect_seconds=5.0) for url in config.run.gateways
    )
    try:
        yield [_Gateway(client, path) for client in clients]
    finally:
        await transport.close()


class JoinedGateways:
    """The gateways of a run. Create it with `open`."""

    def __init__(
        self,
        gateways: Sequence[_Gateway],
        config: TrainConfig,
        policy: ServedPolicy,
        run_id: str,
        note: Callable[[str], None],
    ) -> None:
        self._gateways, self._config, self._policy, self._note = gateways, config, policy, note
        self._run = RunRequest(run_id=run_id)
        self._lease = config.run.gateway_lease_seconds
        self._tokenizer = base64.b64encode(pack_tokenizer(policy.chat)).decode()
        self._pause: Pause | None = None
        """Set during an update."""
        self._joining = asyncio.Lock()
        """Held during updates, and while a gateway that was lost joins again."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: TrainConfig,
        store: LightningStoreBase | None,
        policy: Policy | None,
        run_id: str,
        note: Callable[[str], None],
    ) -> AsyncGenerator[JoinedGateways]:
        """Join the gateways of the settings, and leave them at the end. Raises ConfigError for one that cannot be
        joined."""
        if not isinstance(policy, ServedPolicy):
            raise ConfigError(f"run.gateways={list(config.run.gateways)}: the policy is not sampled by model servers")
        async with _gateways_of(config, store, policy) as gateways:
            joined = cls(gateways, config, policy, run_id, note)
            try:
                await asyncio.gather(*(gateway.first("", joined._join_request()) for gateway in gateways))
                policy.servers.is_used_elsewhere = joined._may_use
                async with in_background(*map(joined._renew, gateways)):
                    yield joined
            finally:
                await joined._leave()

    def _state(self) -> StateRequest:
        servers, weights = self._policy.servers, self._policy.servers.weights
        return StateRequest(
            run_id=self._run.run_id,
            label=None if weights is None else weights.label,
            version=0 if weights is None else weights.version,
            adapters=tuple(
                ServedAdapter(name=each.name, served_name=each.served_name, version=each.version)
                for each in servers.adapters.values()
            ),
            pause=self._pause,
        )

    def _join_request(self) -> JoinRequest:
        policy, settings = self._policy, self._config
        assert isinstance(policy.chat, HFChatFormat)
        if ":" in policy.kind:
            raise ConfigError(
                f"policy.engine={policy.kind!r}: gateways that join know engines by name alone; announce yours as an "
                "entry point agentlightning.engines, there too"
            )
        return JoinRequest(
            **dict(self._state()),
            package=version("agentlightning"),
            kind=policy.kind,
            servers=policy.config.model_copy(update={"token_env": None}),
            server_token=policy.config.token,
            context_length=policy.context_length,
            crosses_updates=settings.policy.in_flight or settings.policy.drain_seconds is not None,
            adapter_routes=policy.table if policy.adapters else None,
            structured_output=settings.gateway.structured_output,
            record_top_logprobs=settings.gateway.record_top_logprobs,
            lease_seconds=self._lease,
            tokenizer=self._tokenizer,
            tool_calls=policy.chat.option,
            eos_token_ids=tuple(sorted(policy.chat.eos_token_ids)),
            probe=tuple(probe_tokens(policy.chat)),
        )

    # -- updates -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def updating(self) -> AsyncGenerator[bool]:
        """A context in which weights may change and new calls wait at all gateways; see `UpdateGate.update`. Raises
        PolicyError if no gateway can be reached."""
        async with self._joining:
            given = self._config.policy
            self._pause = Pause(in_flight=given.in_flight, drain_seconds=given.drain_seconds)
            try:
                await self._all()
                yield any(gateway.last.going_on for gateway in self._gateways if gateway.joined)
            finally:
                self._pause = None
                await self._all()

    def _may_use(self, served_name: str) -> bool:
        """Whether calls at the gateways may use an adapter: any of them until an update is over."""
        here = [gateway for gateway in self._gateways if gateway.joined]
        return self._joining.locked() or any(served_name in gateway.last.adapters for gateway in here)

    async def _all(self) -> None:
        """Bring all gateways into the state of the run. One that cannot be reached for the time of its lease is left
        out. Raises PolicyError for a request that is refused, and if no gateway is left."""
        await asyncio.gather(*map(self._bring, self._gateways))
        if all(gateway.lost for gateway in self._gateways):
            urls = ", ".join(gateway.client.url for gateway in self._gateways)
            raise PolicyError(
                f"none of the run's gateways ({urls}) could be reached for {self._lease:g} s; start them, and continue"
                " the run with --resume"
            )

    async def _bring(self, gateway: _Gateway) -> None:
        loop = asyncio.get_running_loop()
        deadline, paused = loop.time() + self._lease, self._pause is not None
        while not gateway.lost:
            try:
                if gateway.joined:
                    await gateway.send("/state", self._state())
                    if gateway.joined and gateway.last.paused is paused:
                        return
                elif paused:
                    return  # It answers no call of the run, and joins again once servers have the new weights.
                else:
                    return await gateway.send("", self._join_request())
                deadline = loop.time() + self._lease
            except ModelServerError as error:
                if error.status is not None and error.status < 500:
                    raise PolicyError(f"{gateway.client.url} refuses the run: {error}") from error
                if loop.time() >= deadline:
                    gateway.joined, gateway.lost = False, True
                    self._note(f"the run goes on without {gateway.client.url} until it is back: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    # -- leases --------------------------------------------------------------------------------------------------------

    async def _renew(self, gateway: _Gateway) -> None:
        """Say that the run is alive, and join again where a gateway was started again."""
        while True:
            await asyncio.sleep(min(self._lease / RENEWALS, RENEW_SECONDS))
            try:
                if gateway.joined:
                    await gateway.send("/state", self._state())
                    self._policy.servers.remove_unused()
                if not gateway.joined and not self._joining.locked():
                    async with self._joining:
                        await gateway.send("", self._join_request())
                        self._note(f"the run has joined {gateway.client.url} again")
            except (PolicyError, ConfigError) as error:
                log.warning("%s", error)

    async def report(self) -> dict[str, Any]:
        """What the gateways have done for the run."""
        for gateway in self._gateways:
            with suppress(PolicyError, ConfigError):  # The last answer will do.
                await gateway.send("/state", self._state())
        total = Counter[str](dict.fromkeys(("joins", *COUNTS), 0))
        for gateway in self._gateways:
            total.update(gateway.earlier)
            total.update(gateway.last.counts)
        return {"urls": [gateway.client.url for gateway in self._gateways], **total}

    async def _leave(self) -> None:
        self._policy.servers.is_used_elsewhere = lambda served_name: False
        for gateway in filter(lambda gateway: gateway.joined, self._gateways):
            try:
                await gateway.send("/leave", self._run)
            except (PolicyError, ConfigError) as error:
                log.warning("%s; it forgets the run when its lease has ended", error)


def joined_url(config: TrainConfig) -> str | None:
    """The address at which the gateways that a run joins answer its calls; None where it joins none."""
    gateways = config.run.gateways
    return (config.run.public_url or gateways[0]).rstrip("/") if gateways else None


def check_gateways(config: TrainConfig, store: LightningStoreBase | None, algorithm: Algorithm[Any]) -> None:
    """Raises ConfigError for a run that cannot leave its calls to gateways elsewhere."""
    if not config.run.gateways:
        return
    policy, servers = config.policy, config.policy.servers
    problems = {
        "the algorithm trains no model": not algorithm.learns_weights,
        "the gateways need a store that they share with the run: give that of `agl serve` (--server URL, or"
        " Trainer(store=agl.LightningStoreClient(URL)))": store is None,
        'the gateways sample from model servers: set policy.engine = "vllm" or "sglang"': policy.engine == "local",
        "the gateways sample from running model servers: set policy.servers.urls": not servers.urls,
    }
    given, default = config.gateway, GatewayConfig()
    for name, remedy in SERVER_SETTINGS.items():
        problems[f"gateway.{name} {remedy}"] = getattr(given, name) != getattr(default, name)
    for problem in (name for name, found in problems.items() if found):
        raise ConfigError(f"run.gateways={list(config.run.gateways)}: {problem}")


async def check_free(config: TrainConfig, store: LightningStoreBase | None, run_id: str, learner: Policy) -> None:
    """Raises ConfigError where the run's model name or its model servers belong to another run of its gateways. This is
    for the time before the servers get weights: at the join, those of the other run would be gone."""
    if not config.run.gateways:
        return
    urls, changes_weights = config.policy.servers.urls, not capabilities_of(learner).adapters
    request = CheckRequest(run_id=run_id, urls=urls, changes_weights=changes_weights)
    async with _gateways_of(config, store, learner) as gateways:
        for gateway in gateways:
            await gateway.first("/check", request)
