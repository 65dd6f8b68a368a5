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
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

from pydantic import ValidationError

from agentlightning.algorithms.base import Algorithm
from agentlightning.chat.hf import HFChatFormat, pack_tokenizer, probe_tokens
from agentlightning.config import TrainConfig
from agentlightning.engine.servers.clients.http import JsonClient, ModelServerError
from agentlightning.engine.servers.joining import (
    BASE_PATH,
    RENEW_SECONDS,
    CheckRequest,
    JoinRequest,
    JoinStatus,
    RunRequest,
    ServedAdapter,
    StateRequest,
)
from agentlightning.errors import ConfigError, PolicyError
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


class _Gateway(JsonClient):
    """One gateway, and what it has done for the run."""

    def __init__(self, transport: Transport, url: str, token: str | None, model: str) -> None:
        super().__init__(transport, url, token, seconds=REQUEST_SECONDS, connect_seconds=5.0)
        self._path = f"{BASE_PATH}/{quote(model, safe='')}"
        self.joined = self.lost = False
        """Whether it serves the run; whether the run goes on without it."""
        self.last = JoinStatus()
        self.lock = asyncio.Lock()
        """Held while it is told something: a later state must not arrive before an earlier one."""
        self.earlier = Counter[str]()
        """`joins`, and the counts of earlier processes at its address."""

    async def send(self, action: str, request: RunRequest) -> None:
        """Sets `last`. Raises ModelServerError, and ConfigError for the token."""
        answer = await self.post(self._path + action, request.model_dump(mode="json"))
        try:
            status = JoinStatus.model_validate(answer)
        except ValidationError:
            raise self.protocol_error(self._path + action, f"no answer of `agl serve`, but {answer!r:.300}") from None
        if isinstance(request, JoinRequest):
            self.joined, self.lost = True, False
            self.earlier["joins"] += 1
        if status.counts["calls"] < self.last.counts["calls"]:
            self.earlier.update(self.last.counts)
        self.last = status


class JoinedGateways:
    """The gateways of a run, which it has joined in the context of `join`. Create it in the event loop that uses it,
    and `close` it."""

    def __init__(
        self, config: TrainConfig, store: LightningStoreBase | None, run_id: str, note: Callable[[str], None]
    ) -> None:
        self._config, self._run, self._note = config, RunRequest(run_id=run_id), note
        self._lease = config.run.gateway_lease_seconds
        token = store.token if isinstance(store, LightningStoreClient) else os.environ.get("AGL_TOKEN")
        self._transport = Transport()
        self._gateways = [_Gateway(self._transport, url, token, config.policy.name) for url in config.run.gateways]
        self._paused = False
        """Whether the gateways are to hold calls back: weights change."""
        self._updating = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    # -- joining -------------------------------------------------------------------------------------------------------

    async def check_free(self, learner: Policy) -> None:
        """Raises ConfigError where the run's model name or its model servers belong to another run of its gateways.
        This is for the time before the servers get weights: at the join, those of the other run would be gone."""
        urls, changes_weights = self._config.policy.servers.urls, not capabilities_of(learner).adapters
        request = CheckRequest(run_id=self._run.run_id, urls=urls, changes_weights=changes_weights)
        await self._ask("/check", request)

    @asynccontextmanager
    async def join(self, policy: Policy | None) -> AsyncGenerator[None]:
        """A context in which the gateways answer the calls of the run. Raises ConfigError for one that it cannot
        join."""
        config = self._config
        if not isinstance(policy, ServedPolicy):
            raise ConfigError(f"run.gateways={list(config.run.gateways)}: the policy is not sampled by model servers")
        chat, self._policy = policy.chat, policy
        packed = pack_tokenizer(chat)
        assert isinstance(chat, HFChatFormat)
        self._request = JoinRequest(
            **dict(self._state()),
            kind=policy.kind,
            servers=policy.config.model_copy(update={"token_env": None}),
            server_token=policy.config.token,
            context_length=policy.context_length,
            in_flight=config.policy.in_flight,
            drain_seconds=config.policy.drain_seconds,
            adapter_routes=policy.table,
            structured_output=config.gateway.structured_output,
            record_top_logprobs=config.gateway.record_top_logprobs,
            lease_seconds=self._lease,
            tokenizer=base64.b64encode(packed).decode(),
            tool_calls=chat.option,
            eos_token_ids=chat.eos_token_ids,
            probe=probe_tokens(chat),
        )
        try:
            await self._ask("", self._request)
            policy.servers.is_used_elsewhere = self._may_use
            async with in_background(*map(self._renew, self._gateways)):
                yield
        finally:
            for gateway in self._here:
                gateway.joined = False
                try:
                    await gateway.send("/leave", self._run)
                except (PolicyError, ConfigError) as error:
                    log.warning("%s; it forgets the run when its lease has ended", error)

    async def _ask(self, action: str, request: RunRequest) -> None:
        """A request to all gateways at the start of a run. Raises ConfigError for one that the run cannot join."""
        for error in await asyncio.gather(  # Of all, so that it can leave all.
            *(gateway.send(action, request) for gateway in self._gateways), return_exceptions=True
        ):
            if isinstance(error, ModelServerError):
                remedy = "; training runs can join an `agl serve` of this version" if error.status in (404, 405) else ""
                raise ConfigError(f"the run cannot join its gateways: {error}{remedy}") from error
            if error is not None:
                raise error

    # -- what gateways are told ----------------------------------------------------------------------------------------

    @property
    def _here(self) -> list[_Gateway]:
        return [gateway for gateway in self._gateways if gateway.joined]

    def _state(self) -> StateRequest:
        servers = self._policy.servers
        weights = servers.weights
        return StateRequest(
            run_id=self._run.run_id,
            label=weights and weights.label,
            version=weights.version if weights else 0,
            adapters=tuple(
                ServedAdapter.model_validate(each, from_attributes=True) for each in servers.adapters.values()
            ),
            paused=self._paused,
        )

    async def _tell(self, gateway: _Gateway) -> bool:
        """Tell a gateway what servers have and whether calls are to wait; returns whether it does so. One that was
        started again joins, unless weights change: it answers no call of the run."""
        async with gateway.lock:
            try:
                if gateway.joined:
                    await gateway.send("/state", self._state())
            except ModelServerError as error:
                if error.status != 404:
                    raise
                gateway.joined = False
            if not gateway.joined and not self._paused:
                await gateway.send("", self._request.model_copy(update=dict(self._state())))
                self._note(f"the run has joined {gateway.url} again")
            return not gateway.joined or gateway.last.paused is self._paused

    async def _renew(self, gateway: _Gateway) -> None:
        """Say that the run is alive, and join again where a gateway was started again."""
        while True:
            await asyncio.sleep(min(self._lease / RENEWALS, RENEW_SECONDS))
            try:
                await self._tell(gateway)
                self._policy.servers.remove_unused()
            except (PolicyError, ConfigError) as error:
                log.warning("%s", error)

    # -- updates -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def updating(self) -> AsyncGenerator[bool]:
        """A context in which weights may change and new calls wait at all gateways; see `UpdateGate.update`. Raises
        PolicyError if no gateway can be reached."""
        async with self._updating:
            try:
                await self._tell_all(paused=True)
                yield any(gateway.last.going_on for gateway in self._here)
            finally:
                await self._tell_all(paused=False)

    def _may_use(self, served_name: str) -> bool:
        """Whether calls at the gateways may use an adapter: any of them until an update is over."""
        return self._updating.locked() or any(served_name in gateway.last.adapters for gateway in self._here)

    async def _tell_all(self, *, paused: bool) -> None:
        """Returns when all gateways do what they are told. One that cannot be reached for the time of its lease is left
        out. Raises PolicyError for a request that is refused, and if no gateway is left."""
        self._paused = paused
        await asyncio.gather(*map(self._insist, self._gateways))
        if all(gateway.lost for gateway in self._gateways):
            urls = ", ".join(self._config.run.gateways)
            raise PolicyError(
                f"none of the run's gateways ({urls}) could be reached for {self._lease:g} s; start them, and continue"
                " the run with --resume"
            )

    async def _insist(self, gateway: _Gateway) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._lease
        async with gateway.lock:
            pass  # One that was lost may be joining again, and then has to wait as the others.
        while not gateway.lost:
            try:
                if await self._tell(gateway):
                    return
                deadline = loop.time() + self._lease
            except ModelServerError as error:
                if error.status is not None and error.status < 500:
                    raise
                if loop.time() >= deadline:
                    gateway.joined, gateway.lost = False, True
                    self._note(f"the run goes on without {gateway.url} until it is back: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    async def report(self) -> dict[str, Any]:
        """What the gateways have done for the run."""
        await asyncio.gather(*map(self._tell, self._here), return_exceptions=True)  # The last answers will do.
        total = Counter[str]()
        for gateway in self._gateways:
            total.update(gateway.earlier)
            total.update(gateway.last.counts)
        return {"urls": [gateway.url for gateway in self._gateways], **total}


def joined_url(config: TrainConfig) -> str | None:
    """The address at which the gateways that a run joins answer its calls; None where it joins none."""
    gateways = config.run.gateways
    return (config.run.public_url or gateways[0]).rstrip("/") if gateways else None


def check_gateways(config: TrainConfig, store: LightningStoreBase | None, algorithm: Algorithm[Any]) -> None:
    """Raises ConfigError for a run that cannot leave its calls to gateways elsewhere."""
    if not config.run.gateways:
        return
    policy = config.policy
    problems = {
        "the algorithm trains no model": not algorithm.learns_weights,
        "the gateways need a store that they share with the run: give that of `agl serve` (--server URL, or"
        " Trainer(store=agl.LightningStoreClient(URL)))": store is None,
        'the gateways sample from model servers: set policy.engine = "vllm" or "sglang"': policy.engine == "local",
        "the gateways sample from running model servers: set policy.servers.urls": not policy.servers.urls,
        f"they know engines by name alone, and policy.engine={policy.engine!r} is none: announce it as an entry point"
        " agentlightning.engines, there too": ":" in policy.engine,
    }
    given = config.gateway.model_dump(exclude_defaults=True)
    problems |= {f"gateway.{name} {remedy}": name in given for name, remedy in SERVER_SETTINGS.items()}
    for problem, found in problems.items():
        if found:
            raise ConfigError(f"run.gateways={list(config.run.gateways)}: {problem}")
