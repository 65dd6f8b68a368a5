"""The policies of training runs elsewhere: who may join, when their calls wait, and when a run counts as gone.

A run joins under the name of its model, with the model servers and the tokenizer that are needed to sample from it. It
holds calls back while it changes the weights, through the gateway's update gate. A run that is silent for the time of
its lease counts as gone: its calls, those that wait included, are refused until it joins again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import orjson
from prometheus_client.metrics_core import Metric
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.chat.hf import HFChatFormat, load_chat_format, probe_tokens, unpack_tokenizer
from agentlightning.engine.base import ConstraintKind, EngineUnavailableError, OnTokens, Sample, SamplingParams
from agentlightning.engine.servers.clients.http import PROBE_PROMPT, ModelServerError, SampleRequest
from agentlightning.engine.servers.joining import (
    BASE_PATH,
    COUNTS,
    CheckRequest,
    JoinRequest,
    JoinStatus,
    RunRequest,
    StateRequest,
)
from agentlightning.engine.servers.pool import PooledEngine, ReplicaPool, open_servers
from agentlightning.errors import AgentLightningError, ConfigError, ConflictError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.local import UpdateGates
from agentlightning.observability.metrics import counters, metric_of
from agentlightning.store.http.endpoint import MAX_BODY_BYTES, RequestError, endpoint, read_body, respond

log = logging.getLogger(__name__)

MAX_POLL_SECONDS: Final = 10.0
"""How long a request to pause waits for answers in progress, at most; the run then repeats it."""


class JoinedPolicy(PooledEngine):
    """The policy of a run: an engine over its model servers. The trainer gives these their weights and adapters, and a
    server samples once it has those that the trainer names."""

    watch: asyncio.Task[None]
    """Ends it with the lease that began when its trainer last joined."""

    def __init__(self, request: JoinRequest, servers: ReplicaPool, gates: UpdateGates) -> None:
        self.model = servers.model
        self.gate = gates.of(self)
        self.unavailable: str | None = None
        """Why it samples nothing; None: it does."""
        self.counts = JoinStatus().counts
        self.holding: asyncio.Task[AsyncExitStack] | None = None
        """Set during an update; done once the calls under way have ended, or go on across it. Calls go on when what it
        returns is closed."""
        self._held_since = 0.0
        self.follow(request, servers)

    def follow(self, request: JoinRequest, servers: ReplicaPool) -> None:
        """Sample from these servers."""
        self.request, self.servers = request, servers
        self.table = request.adapter_routes
        self.__dict__.pop("views", None)
        self.heard_at, self.unavailable = time.monotonic(), None

    @property
    def lease_left(self) -> float:
        """Seconds."""
        return max(0.0, self.heard_at + self.request.lease_seconds - time.monotonic())

    def status(self) -> JoinStatus:
        return JoinStatus(
            counts=self.counts,
            paused=self.holding is not None and self.holding.done(),
            going_on=self.gate.num_in_flight,
            adapters=self.servers.adapters_in_use,
        )

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return self.unavailable is None and await super().can_enforce(text, kind)

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `AgentEngines.sample_adapter`. Raises EngineUnavailableError once the run is gone. An answer that is cut
        off when the trainer is started again begins anew, unless it is streamed."""
        while True:
            servers = self.servers
            try:
                if self.unavailable is not None:
                    raise EngineUnavailableError(self.unavailable)
                sample = await servers.sample_adapter(adapter, prompt_token_ids, params, on_tokens, affinity=affinity)
            except AgentLightningError as error:
                moved = servers is not self.servers or self.unavailable is not None
                if moved and on_tokens is None and not isinstance(error, EngineUnavailableError):
                    continue
                self.counts["failed"] += 1
                raise
            self.counts["calls"] += 1
            self.counts["tokens"] += len(sample.token_ids)
            return sample

    async def hold(self) -> None:
        """Hold calls back; returns once they are, or after a part of the lease."""
        if self.holding is None:
            self.holding, self._held_since = asyncio.create_task(self._hold()), time.monotonic()
        await asyncio.wait({self.holding}, timeout=min(MAX_POLL_SECONDS, self.request.lease_seconds / 3))

    async def _hold(self) -> AsyncExitStack:
        how = self.request
        async with AsyncExitStack() as stack:
            update = self.gate.update(in_flight=how.in_flight, drain_seconds=how.drain_seconds)
            await stack.enter_async_context(update)
            await stack.enter_async_context(self.servers.lock)  # While it is held, health checks judge no weights.
            return stack.pop_all()

    async def release(self, *, updated: bool) -> None:
        """Let calls go on, whatever happens; after an update, only to servers that have the new weights."""
        holding, since = self.holding, self._held_since
        self.holding = None
        if holding is None:
            return
        try:
            if updated and holding.done():
                await self.servers.update_replicas()
                self.counts["updates"] += 1
        finally:
            self.counts["held"] += self.gate.num_waiting
            self.counts["held_seconds"] += time.monotonic() - since
            if holding.cancel():
                await asyncio.wait({holding})
            else:  # At once: a release that is cancelled in a wait before it would leave the calls waiting for ever.
                await holding.result().aclose()

    async def end(self, reason: str) -> None:
        """Sample nothing from now on."""
        servers, self.unavailable = self.servers, self.unavailable or reason
        await self.release(updated=False)
        await servers.close()  # Not those of a trainer that was started again meanwhile.


class JoinedPolicies:
    """The policies of the runs that have joined a gateway. Create it in the event loop that serves. With `accepts`
    False this process is one of several, of which a run's request would reach one: runs are refused."""

    def __init__(self, gateway: Gateway, accepts: bool) -> None:
        self._gateway, self._accepts = gateway, accepts
        self._policies: dict[str, JoinedPolicy] = {}
        """By the name of their model."""
        self._joining = asyncio.Lock()
        self._events = Counter(joins=0, refused=0, gone=0, left=0)
        self._counts: list[dict[str, int | float]] = []
        """Those of all runs, gone or here."""

    def routes(self, token: str | None) -> list[Route]:
        """The routes for trainers, which require `token` if there is one."""
        kinds = {"/check": CheckRequest, "": JoinRequest, "/state": StateRequest, "/leave": RunRequest}
        return [
            Route(f"{BASE_PATH}/{{model}}{action}", endpoint(partial(self._respond, kind), token), methods=["POST"])
            for action, kind in kinds.items()
        ]

    async def _respond(self, kind: type[RunRequest], request: Request) -> Response:
        """Raises RequestError for a request of another version, or none at all."""
        body = await read_body(request.headers, request.receive, MAX_BODY_BYTES)
        try:
            content = orjson.loads(body)
            here = version("agentlightning")
            if isinstance(content, dict) and (there := content.get("package", here)) != here:
                message = (
                    f"this server has agentlightning {here}, and the run {there}; install the same version on both"
                )
                raise RequestError(message, 422)
            given = kind.model_validate(content)
        except (orjson.JSONDecodeError, ValidationError) as error:
            raise RequestError(f"the request cannot be read: {error}") from None
        return respond((await self._answer(request.path_params["model"], given)).model_dump_json().encode())

    async def _answer(self, model: str, request: RunRequest) -> JoinStatus:
        """Do what the run whose policy is `model` asks for: see `engine.servers.joining`. Raises RequestError."""
        if not self._accepts:
            raise RequestError(
                "this server has several processes (agl serve --workers), and a run must pause and update each: start"
                " servers without --workers, and list all of them in run.gateways",
                422,
            )
        try:
            if isinstance(request, CheckRequest):
                self._refuse_conflicts(model, request)
                return JoinStatus()
            if isinstance(request, JoinRequest):
                async with self._joining:
                    return await self._join(model, request)
        except AgentLightningError:
            self._events["refused"] += 1
            raise
        policy = self._policies.get(model)
        if policy is None or policy.request.run_id != request.run_id or policy.unavailable is not None:
            raise RequestError(f"run {request.run_id} has not joined as {model!r}, or its lease has ended", 404)
        policy.heard_at = time.monotonic()
        if not isinstance(request, StateRequest):
            await self._remove(policy)
            self._events["left"] += 1
            log.info("run %s, which was served as %s, has left", request.run_id, model)
        elif request.paused:
            await policy.hold()
        else:
            _name_weights(policy.servers, request)
            await policy.release(updated=True)
        return policy.status()

    def _refuse_conflicts(self, model: str, request: CheckRequest) -> None:
        self._gateway.router.check_names(model, [model, *request.views])
        for policy in self._policies.values():
            other = policy.request.check
            shared = sorted({*request.urls} & {*other.urls})
            if other.run_id == request.run_id or policy.unavailable is not None:
                continue
            if policy.model == model:
                message = f"the model name {model!r} belongs to run {other.run_id}; set another policy.name"
            elif shared and (request.changes_weights or other.changes_weights):
                message = (
                    f"run {other.run_id} samples from {', '.join(shared)}, too, and one of the two runs would replace"
                    " the weights of the other; give each run model servers of its own (policy.servers.urls), or train"
                    " adapters in both"
                )
            else:
                continue
            raise ConflictError(
                f"{message}, or, if that run was killed, wait {policy.lease_left:.0f} s for the end of its lease"
            )

    async def _join(self, model: str, request: JoinRequest) -> JoinStatus:
        """Answer the calls of a run from now on."""
        gateway = self._gateway
        self._refuse_conflicts(model, request.check)
        try:
            servers = await _open_servers(request, model)
        except AgentLightningError as error:
            status = 503 if isinstance(error, ModelServerError) and error.retryable else 422
            raise RequestError(f"this server cannot sample from the policy: {error}", status) from error
        policy, old = self._policies.get(model), None
        if policy is not None and policy.request.run_id == request.run_id:
            policy.watch.cancel()
            old = policy.servers
            policy.follow(request, servers)
        else:
            if policy is not None:
                await self._remove(policy)
            policy = self._policies[model] = JoinedPolicy(request, servers, gateway.gates)
            self._counts.append(policy.counts)
        policy.watch = asyncio.create_task(self._watch(policy))
        gateway.add_policy(model, policy, request)
        if old is not None:  # Its trainer was started again: what it held back goes on with the weights it has now.
            await old.close()
            await policy.release(updated=False)
        self._events["joins"] += 1
        log.info("run %s joined as %s, with weights of version %d", request.run_id, model, request.version)
        return policy.status()

    async def _watch(self, policy: JoinedPolicy) -> None:
        """Refuse the calls of a run once it has been silent for the time of its lease."""
        while policy.lease_left:  # noqa: ASYNC110  each request of the run puts the end of its lease off
            await asyncio.sleep(policy.lease_left)
        self._events["gone"] += 1
        reason = (
            f"the trainer of run {policy.request.run_id}, whose policy is {policy.model!r}, has not been heard from"
            f" for {policy.request.lease_seconds:g} s; the call can be repeated once the run was resumed"
        )
        log.warning("%s; %d calls waited for it", reason, policy.gate.num_waiting)
        await policy.end(reason)

    async def _remove(self, policy: JoinedPolicy) -> None:
        del self._policies[policy.model]
        self._gateway.remove_policy(policy.model)
        policy.watch.cancel()
        await policy.end(f"run {policy.request.run_id}, whose policy was {policy.model!r}, has left this server")

    async def close(self) -> None:
        """End all runs' policies; their trainers join the next server at this address."""
        for policy in list(self._policies.values()):
            await self._remove(policy)

    def metrics(self) -> Iterable[Metric]:
        """The metrics of all runs, since the server was started."""
        alive = [policy for policy in self._policies.values() if policy.unavailable is None]
        yield metric_of("joined_runs", "Training runs whose policy this server answers for.", len(alive))
        paused = sum(policy.holding is not None for policy in alive)
        yield metric_of("joined_runs_paused", "Those that hold their calls back for an update.", paused)
        counts = {name: sum(each[name] for each in self._counts) for name in COUNTS}
        yield from counters("joined", "Training runs that joined", {**counts, **self._events})


async def _open_servers(request: JoinRequest, model: str) -> ReplicaPool:
    """The servers that a run names. Raises ConfigError for servers that cannot be sampled from here, ModelServerError
    for one that does not answer, and where none has the run's weights."""
    pool = await open_servers(
        request.servers,
        await _open_chat(request),
        kind=request.kind,
        name=model,
        max_context=request.context_length,
        token=request.server_token,
    )
    try:
        _name_weights(pool, request)
        async with pool.lock:
            await pool.update_replicas()
        if not pool.up:
            raise ModelServerError("; ".join(replica.failure for replica in pool.replicas), retryable=True)
        crosses_updates = request.label is not None and (request.in_flight or request.drain_seconds is not None)
        for replica in pool.replicas if crosses_updates else ():
            info = await replica.server.model_info()
            probe = SampleRequest(info.model, PROBE_PROMPT, SamplingParams(), 1, frozenset())
            if not (await replica.server.sample(probe, lambda chunk: None, stream=False)).weights:
                raise ConfigError(
                    f"{replica.url} does not report which weights sampled which tokens, so answers cannot go on across"
                    " an update; start it with --enable-scale-out, or leave policy.in_flight and policy.drain_seconds"
                    " out"
                )
    except BaseException:
        await pool.close()
        raise
    return pool


def _name_weights(servers: ReplicaPool, request: StateRequest) -> None:
    if request.label is not None:
        servers.announce_weights(request.label, request.version)
    for each in request.adapters:
        servers.announce_adapter(each.name, each.served_name, each.version)


async def _open_chat(request: JoinRequest) -> HFChatFormat:
    """The chat format of a run's model. Raises ConfigError where it is not exactly that of the trainer."""
    with TemporaryDirectory(prefix="agl-joined-") as directory:
        try:
            packed = base64.b64decode(request.tokenizer, validate=True)
        except binascii.Error as error:
            raise ConfigError(f"the tokenizer's archive is not base64: {error}") from error
        await asyncio.to_thread(unpack_tokenizer, packed, Path(directory))
        chat = await load_chat_format(directory, request.tool_calls, request.eos_token_ids)
        probe = await asyncio.to_thread(probe_tokens, chat)
    if probe != request.probe or chat.eos_token_ids != request.eos_token_ids:
        raise ConfigError(
            "this server's tokenizer gives other tokens than the trainer's: it has another version of transformers or"
            " tokenizers; install the trainer's"
        )
    return chat
