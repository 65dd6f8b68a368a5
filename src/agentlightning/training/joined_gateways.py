"""The gateways that a run has joined: `agl serve` processes that answer its model calls (`engine.servers.joining`).

The trainer tells them which servers to sample from, holds calls back while it changes the weights, and announces each
version to all of them. It never sees a call: what was sampled is in the store.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import quote

from agentlightning.algorithms.base import Algorithm
from agentlightning.chat.hf import HFChatFormat
from agentlightning.chat.tokenizer_archive import pack_tokenizer, probe_tokens
from agentlightning.config import TrainConfig
from agentlightning.engine.servers.base import ModelServerError
from agentlightning.engine.servers.clients.http import JsonClient
from agentlightning.engine.servers.joining import (
    BASE_PATH,
    PROTOCOL,
    RENEW_SECONDS,
    AnnounceRequest,
    CheckRequest,
    JoinRequest,
    JoinStatus,
    PauseRequest,
    RunRequest,
    ServedAdapter,
)
from agentlightning.engine.servers.replica import Adapter, LabeledWeights
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.gateway.config import GatewayConfig
from agentlightning.policy.base import Policy, capabilities_of
from agentlightning.policy.served import ServedPolicy
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.transport import Transport, open_transport

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
COUNTS: Final = ("calls", "tokens", "failed", "held", "updates", "held_seconds")


class _Gateway:
    """One gateway, and what it has done for the run."""

    def __init__(self, client: JsonClient, path: str) -> None:
        self.client, self._path = client, path
        self.joined = self.lost = False
        """Whether it serves the run; whether the run goes on without it."""
        self.joins = 0
        self.last = JoinStatus()
        self._before = dict.fromkeys(COUNTS, 0.0)
        """Counts of earlier processes at its address."""

    async def join(self, request: JoinRequest) -> None:
        await self.post("", request)
        self.joined, self.lost = True, False
        self.joins += 1

    async def post(self, action: str, request: RunRequest) -> JoinStatus:
        """Raises ModelServerError, and ConfigError for the token."""
        response = await self.client.post(self._path + action, request.model_dump())
        status = JoinStatus.model_validate(response)
        if status.calls < self.last.calls:  # It was started again.
            self._before = {name: count + getattr(self.last, name) for name, count in self._before.items()}
        self.last = status
        return status

    def counts(self) -> dict[str, float]:
        return {name: count + getattr(self.last, name) for name, count in self._before.items()}


class JoinedGateways:
    """The gateways of a run. Create it with `open`."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None,
        policy: ServedPolicy,
        run_id: str,
        *,
        lease_seconds: float,
        crosses_updates: bool,
        settings: GatewayConfig | None = None,
        note: Callable[[str], None],
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._policy, self._run_id, self._lease = policy, run_id, lease_seconds
        self._crosses_updates, self._note = crosses_updates, note
        self._settings = settings or GatewayConfig()
        self._transport = open_transport()
        path = _path_of(policy)
        self._gateways = [_Gateway(_client(self._transport, url, token), path) for url in self.urls]
        self._tokenizer = base64.b64encode(pack_tokenizer(policy.chat)).decode()
        self._joining = asyncio.Lock()
        """Held during updates, and while a gateway that was lost joins again."""
        self._renewals: list[asyncio.Task[None]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, *arguments: Any, **options: Any) -> AsyncGenerator[JoinedGateways]:
        """Join all gateways, and leave them at the end. Raises ConfigError for one that cannot be joined."""
        gateways = cls(*arguments, **options)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(gateways._transport.close)
            stack.push_async_callback(gateways._leave)
            await asyncio.gather(*map(gateways._join_first, gateways._gateways))
            servers = gateways._policy.servers
            servers.on_new, servers.used_elsewhere = gateways._announce, gateways._in_use
            gateways._renewals = [asyncio.create_task(gateways._renew(each)) for each in gateways._gateways]
            yield gateways

    async def _join_first(self, gateway: _Gateway) -> None:
        with _refusals(gateway.client.url):
            await gateway.join(self._join_request())

    def _join_request(self) -> JoinRequest:
        policy, weights = self._policy, self._policy.servers.weights
        assert isinstance(policy.chat, HFChatFormat)
        if ":" in policy.kind:
            raise ConfigError(
                f"policy.engine={policy.kind!r}: gateways that join know engines by name alone; announce yours as an "
                "entry point agentlightning.engines, there too"
            )
        return JoinRequest(
            run_id=self._run_id,
            protocol=PROTOCOL,
            package=version("agentlightning"),
            kind=policy.kind,
            urls=policy.config.urls,
            server_token=policy.config.token,
            context_length=policy.context_length,
            retries=policy.config.retries,
            wait_seconds=policy.config.wait_seconds,
            timeout_seconds=policy.config.timeout_seconds,
            crosses_updates=self._crosses_updates,
            label=None if weights is None else weights.label,
            version=0 if weights is None else weights.version,
            adapters=tuple(map(_served, policy.servers.adapters.values())),
            adapter_routes=policy.table if policy.adapters else None,
            structured_output=self._settings.structured_output,
            record_top_logprobs=self._settings.record_top_logprobs,
            lease_seconds=self._lease,
            tokenizer=self._tokenizer,
            tool_calls=policy.chat.option,
            eos_token_ids=tuple(sorted(policy.chat.eos_token_ids)),
            probe=tuple(probe_tokens(policy.chat)),
        )

    # -- updates -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def updating(self, in_flight: bool, drain_seconds: float | None) -> AsyncGenerator[bool]:
        """A context in which weights may change and new calls wait at all gateways; see `UpdateGate.update`. Raises
        PolicyError if no gateway can be reached."""
        async with self._joining:
            request = PauseRequest(run_id=self._run_id, in_flight=in_flight, drain_seconds=drain_seconds)
            try:
                await self._all("/pause", request, until=lambda status: status.paused)
                yield any(gateway.last.going_on for gateway in self._gateways if gateway.joined)
            finally:
                await self._all("/resume", RunRequest(run_id=self._run_id))

    async def _announce(self, new: LabeledWeights | Adapter) -> None:
        if isinstance(new, Adapter):
            request = AnnounceRequest(run_id=self._run_id, adapters=(_served(new),))
        else:
            request = AnnounceRequest(run_id=self._run_id, label=new.label, version=new.version)
        await self._all("/announce", request)

    def _in_use(self) -> set[str]:
        """The served names of adapters that calls at the gateways use."""
        return {name for gateway in self._gateways if gateway.joined for name in gateway.last.adapters}

    async def _all(
        self, action: str, request: RunRequest, until: Callable[[JoinStatus], bool] = lambda status: True
    ) -> None:
        """Send a request to all gateways, again until `until`. One that cannot be reached for the time of its lease is
        left out. Raises PolicyError for a request that is refused, and if no gateway is left."""
        here = [gateway for gateway in self._gateways if not gateway.lost]
        await asyncio.gather(*(self._send(gateway, action, request, until) for gateway in here))
        if all(gateway.lost for gateway in self._gateways):
            raise PolicyError(
                f"none of the run's gateways ({', '.join(self.urls)}) could be reached for {self._lease:g} s; start"
                " them, and continue the run with --resume"
            )

    async def _send(
        self, gateway: _Gateway, action: str, request: RunRequest, until: Callable[[JoinStatus], bool]
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._lease
        while True:
            try:
                if not gateway.joined and action != "/resume":
                    return  # It answers no call of the run, and joins again once servers have the new weights.
                if not gateway.joined:
                    await gateway.join(self._join_request())
                if until(await gateway.post(action, request)):
                    return
                deadline = loop.time() + self._lease
            except ModelServerError as error:
                if error.status == 404:  # It was started again, or our lease has ended there.
                    gateway.joined = False
                    continue
                elif error.status is not None and error.status < 500:
                    raise PolicyError(f"{gateway.client.url} refuses the run: {error}") from error
                if loop.time() >= deadline:
                    gateway.joined, gateway.lost = False, True
                    self._note(f"the run goes on without {gateway.client.url} until it is back: {error}")
                    return
                await asyncio.sleep(RETRY_SECONDS)

    # -- leases --------------------------------------------------------------------------------------------------------

    async def _renew(self, gateway: _Gateway) -> None:
        """Say that the run is alive, and join again where a gateway was started again."""
        while True:
            await asyncio.sleep(min(self._lease / RENEWALS, RENEW_SECONDS))
            try:
                if gateway.joined:
                    await self._send_renewal(gateway)
                if not gateway.joined and not self._joining.locked():
                    async with self._joining:
                        await gateway.join(self._join_request())
                        self._note(f"the run has joined {gateway.client.url} again")
            except (PolicyError, ConfigError) as error:
                log.warning("%s", error)

    async def _send_renewal(self, gateway: _Gateway) -> None:
        try:
            await gateway.post("/renew", RunRequest(run_id=self._run_id))
        except ModelServerError as error:
            if error.status != 404:
                raise
            gateway.joined = False
        self._policy.servers.remove_unused()

    async def report(self) -> dict[str, Any]:
        """What the gateways have done for the run."""
        for gateway in self._gateways:
            with suppress(PolicyError, ConfigError):  # The last answer will do.
                await gateway.post("/renew", RunRequest(run_id=self._run_id))
        counts = [gateway.counts() for gateway in self._gateways]
        total = {name: sum(each[name] for each in counts) for name in COUNTS}
        whole = {name: value if name == "held_seconds" else int(value) for name, value in total.items()}
        return {"urls": self.urls, "joins": sum(gateway.joins for gateway in self._gateways), **whole}

    async def _leave(self) -> None:
        for task in self._renewals:
            task.cancel()
        await asyncio.gather(*self._renewals, return_exceptions=True)
        servers = self._policy.servers
        servers.on_new, servers.used_elsewhere = None, tuple
        for gateway in filter(lambda gateway: gateway.joined, self._gateways):
            try:
                await gateway.post("/leave", RunRequest(run_id=self._run_id))
            except (PolicyError, ConfigError) as error:
                log.warning("%s; it forgets the run when its lease has ended", error)


def _served(adapter: Adapter) -> ServedAdapter:
    return ServedAdapter(name=adapter.name, served_name=adapter.served_name, version=adapter.version)


def _path_of(policy: Policy) -> str:
    return f"{BASE_PATH}/{quote(policy.model, safe='')}"


def _client(transport: Transport, url: str, token: str | None) -> JsonClient:
    return JsonClient(transport, url, token, seconds=REQUEST_SECONDS, connect_seconds=5.0)


@contextmanager
def _refusals(url: str) -> Generator[None]:
    """Raise ConfigError for a gateway that a run cannot join at its start."""
    try:
        yield
    except ModelServerError as error:
        if error.status in (404, 405):
            message = f"{url} is no `agl serve` that training runs can join; install this version there"
            raise ConfigError(f"{message} ({error})") from error
        raise ConfigError(f"the run cannot join {url}: {error}") from error


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
    urls = config.policy.servers.urls
    changes_weights = not capabilities_of(learner).adapters
    request = CheckRequest(run_id=run_id, urls=urls, changes_weights=changes_weights)
    transport = open_transport()
    try:
        for url in (given.rstrip("/") for given in config.run.gateways):
            with _refusals(url):
                await _client(transport, url, _token(store)).post(_path_of(learner) + "/check", request.model_dump())
    finally:
        await transport.close()


def _token(store: LightningStoreBase | None) -> str | None:
    token = store.token if isinstance(store, LightningStoreClient) else os.environ.get("AGL_TOKEN")
    return token or None


async def join_gateways(
    config: TrainConfig,
    policy: Policy | None,
    store: LightningStoreBase | None,
    run_id: str,
    note: Callable[[str], None],
    stack: AsyncExitStack,
) -> JoinedGateways | None:
    """Join the gateways of the settings until the stack is closed; None where there are none. Raises ConfigError."""
    if not config.run.gateways:
        return None
    if not isinstance(policy, ServedPolicy):
        raise ConfigError(f"run.gateways={list(config.run.gateways)}: the policy is not sampled by model servers")
    opened = JoinedGateways.open(
        config.run.gateways,
        _token(store),
        policy,
        run_id,
        lease_seconds=config.run.gateway_lease_seconds,
        crosses_updates=config.policy.in_flight or config.policy.drain_seconds is not None,
        settings=config.gateway,
        note=note,
    )
    return await stack.enter_async_context(opened)
