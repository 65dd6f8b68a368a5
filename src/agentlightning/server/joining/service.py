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
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from agentlightning.chat.hf import HFChatFormat, load_chat_format
from agentlightning.chat.tokenizer_archive import probe_tokens, unpack_tokenizer
from agentlightning.engine.adapter_view import AdapterTable
from agentlightning.engine.servers.base import ModelServerError
from agentlightning.engine.servers.followed import FollowedPolicy, open_followed
from agentlightning.engine.servers.joining import (
    AnnounceRequest,
    CheckRequest,
    JoinRequest,
    JoinStatus,
    PauseRequest,
    RunRequest,
)
from agentlightning.errors import AgentLightningError, ConfigError, MissingExtraError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.local.service import LocalSettings
from agentlightning.gateway.local.update_gate import UpdateGate
from agentlightning.observability.metrics import counters

log = logging.getLogger(__name__)

PAUSE_POLL_SECONDS = 10.0
"""How long a request to pause waits for answers in progress; the run then repeats it."""
COUNTS: Final = ("calls", "tokens", "failed", "held", "updates", "held_seconds")
"""What a `JoinStatus` counts."""


class JoinError(AgentLightningError):
    """A request of a run that is refused, with the status of its response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Update:
    """A weight update in progress."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Set once calls are held back, with whether some go on across the update."""
        self.released = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class JoinedRun:
    """A run that has joined, and its policy."""

    policy: FollowedPolicy
    gate: UpdateGate
    heard_at: float = field(default_factory=time.monotonic)
    update: _Update | None = None
    watch: asyncio.Task[None] | None = None
    held: int = 0
    updates: int = 0
    held_seconds: float = 0.0

    @property
    def request(self) -> JoinRequest:
        """That it joined with."""
        return self.policy.request

    @property
    def run_id(self) -> str:
        return self.request.run_id

    @property
    def gone(self) -> bool:
        return self.policy.unavailable is not None

    @property
    def lease_left(self) -> float:
        """Seconds."""
        return max(0.0, self.heard_at + self.request.lease_seconds - time.monotonic())

    def status(self) -> JoinStatus:
        paused = self.update is not None and self.update.held.done()
        return JoinStatus(
            calls=self.policy.calls,
            tokens=self.policy.tokens,
            failed=self.policy.failed,
            held=self.held,
            updates=self.updates,
            held_seconds=self.held_seconds,
            paused=paused,
            going_on=self.gate.num_in_flight if paused else 0,
            adapters=self.policy.servers.adapters_in_use,
        )

    async def hold(self, request: PauseRequest) -> None:
        """Hold calls back; returns once they are, or after a while."""
        if self.update is None:
            self.update = update = _Update()
            update.task = asyncio.create_task(self._hold(update, request))
        await asyncio.wait({self.update.held}, timeout=PAUSE_POLL_SECONDS)

    async def _hold(self, update: _Update, request: PauseRequest) -> None:
        servers = self.policy.servers
        holding = self.gate.update(in_flight=request.in_flight, drain_seconds=request.drain_seconds)
        async with holding as going_on, servers.lock:  # Health checks judge no weights while the lock is held.
            update.held.set_result(going_on)
            await update.released.wait()
            self.held += self.gate.num_waiting

    async def release(self, *, updated: bool) -> None:
        """Let calls go on, whatever happens; after an update, only to servers that have the new weights."""
        update, self.update = self.update, None
        if update is None:
            return
        try:
            if updated:
                await self.policy.servers.update_replicas()
                self.updates += 1
        finally:
            update.released.set()
            if update.task is not None:
                if not update.held.done():
                    update.task.cancel()
                await asyncio.wait({update.task})
            self.held_seconds += time.monotonic() - update.since


class JoinedPolicies:
    """The runs that have joined a gateway. Create it in the event loop that serves."""

    def __init__(self) -> None:
        self._gateway: Gateway | None = None
        self._runs: dict[str, JoinedRun] = {}
        """By the name of their model."""
        self._joining = asyncio.Lock()
        self.joins = self.refused = self.gone = self.left = 0
        self._totals = JoinStatus()
        """Of runs that are no longer here."""

    def attach(self, gateway: Gateway) -> None:
        """Serve the policies through this gateway."""
        self._gateway = gateway
        gateway.router.takes_runs = True

    async def answer(self, model: str, action: str, request: RunRequest) -> JoinStatus:
        """Do what the run whose policy is `model` asks for: see `engine.servers.joining`. Raises JoinError."""
        try:
            if isinstance(request, CheckRequest):
                self._refuse_conflicts(model, request.run_id, request.urls, request.changes_weights)
                return JoinStatus()
            if isinstance(request, JoinRequest):
                return await self._join(model, request)
        except AgentLightningError as error:
            self.refused += 1
            raise _as_join_error(error) from error
        run = self._get(model, request)
        if isinstance(request, PauseRequest):
            await run.hold(request)
        elif isinstance(request, AnnounceRequest):
            try:
                run.policy.announce(request)
            except ConfigError as error:
                raise JoinError(422, str(error)) from error
        elif action == "/resume":
            await run.release(updated=True)
        elif action == "/leave":
            await self._remove(model, run)
            self.left += 1
            log.info("run %s, which was served as %s, has left", run.run_id, model)
        return run.status()

    def _refuse_conflicts(self, model: str, run_id: str, urls: Iterable[str], changes_weights: bool) -> None:
        others = {name: run for name, run in self._runs.items() if run.run_id != run_id and not run.gone}
        if (other := others.get(model)) is not None:
            raise JoinError(
                409,
                f"the model name {model!r} belongs to run {other.run_id}; set another policy.name, or, if that run was"
                f" killed, wait {other.lease_left:.0f} s for the end of its lease",
            )
        for run in others.values():
            shared = {url.rstrip("/") for url in urls} & {url.rstrip("/") for url in run.request.urls}
            if shared and (changes_weights or run.request.label is not None):
                raise JoinError(
                    409,
                    f"run {run.run_id} samples from {', '.join(sorted(shared))}, too, and one of the two runs would"
                    " replace the weights of the other; give each run model servers of its own"
                    " (policy.servers.urls), or train adapters in both. If that run was killed, wait"
                    f" {run.lease_left:.0f} s for the end of its lease",
                )

    async def _join(self, model: str, request: JoinRequest) -> JoinStatus:
        async with self._joining:
            run = await self._serve(model, request)
            self.joins += 1
            log.info("run %s joined as %s, with weights of version %d", run.run_id, model, request.version)
            return run.status()

    async def _serve(self, model: str, request: JoinRequest) -> JoinedRun:
        """The run, whose calls are answered from now on."""
        assert self._gateway is not None
        self._refuse_conflicts(model, request.run_id, request.urls, request.label is not None)
        known = self._runs.get(model)
        try:
            self._gateway.router.check_names(model, [model, *(request.adapter_routes or AdapterTable()).views])
        except ConfigError as error:
            raise JoinError(409, str(error)) from error
        servers = await open_followed(request, model, await _open_chat(request))
        settings = LocalSettings(request.structured_output, request.record_top_logprobs)
        if known is not None and known.run_id == request.run_id:
            # Its trainer was started again: what it held back goes on with the weights it has now.
            run = known
            run.heard_at = time.monotonic()
            await run.policy.move(request, servers)
            self._gateway.add_policy(model, run.policy, settings)
            await run.release(updated=False)
        else:
            if known is not None:
                await self._remove(model, known)
            policy = FollowedPolicy(request, servers)
            self._gateway.add_policy(model, policy, settings)
            run = JoinedRun(policy, self._gateway.gates.of(policy))
            self._runs[model] = run
        if run.watch is None or run.watch.done():
            run.watch = asyncio.create_task(self._watch(run))
        return run

    def _get(self, model: str, request: RunRequest) -> JoinedRun:
        """The run that sends a request, whose lease this renews. Raises JoinError."""
        run = self._runs.get(model)
        if run is None or run.run_id != request.run_id or run.gone:
            raise JoinError(404, f"run {request.run_id} has not joined as {model!r}, or its lease has ended")
        run.heard_at = time.monotonic()
        return run

    async def _watch(self, run: JoinedRun) -> None:
        """Refuse the calls of a run once it has been silent for the time of its lease."""
        while True:  # Each request of the run puts the end of its lease off.
            if (left := run.lease_left) == 0:
                break
            await asyncio.sleep(left)
        self.gone += 1
        reason = (
            f"the trainer of run {run.run_id}, whose policy is {run.policy.model!r}, has not been heard from for"
            f" {run.request.lease_seconds:g} s; the call can be repeated once the run was resumed"
        )
        log.warning("%s; %d calls waited for it", reason, run.gate.num_waiting)
        run.policy.end(reason)
        await run.release(updated=False)
        await run.policy.close()

    async def _remove(self, model: str, run: JoinedRun) -> None:
        assert self._gateway is not None
        del self._runs[model]
        self._gateway.remove_policy(model)
        if run.watch is not None:
            run.watch.cancel()
        run.policy.end(run.policy.unavailable or f"run {run.run_id}, whose policy was {model!r}, has left this server")
        await run.release(updated=False)
        await run.policy.close()
        self._totals = JoinStatus.model_validate(_counts(self._totals, run.status()))

    async def close(self) -> None:
        """End all runs' policies; their trainers join the next server at this address."""
        for model, run in list(self._runs.items()):
            await self._remove(model, run)

    def metrics(self) -> Iterable[Metric]:
        """The metrics of all runs, since the server was started."""
        alive = [run for run in self._runs.values() if not run.gone]
        paused = sum(run.update is not None for run in alive)
        for name, help_text, value in (
            ("joined_runs", "Training runs whose policy this server answers for.", len(alive)),
            ("joined_runs_paused", "Those that hold their calls back for an update.", paused),
        ):
            yield GaugeMetricFamily(f"agentlightning_{name}", help_text, value)
        counts = _counts(self._totals, *(run.status() for run in self._runs.values()))
        counts |= {"joins": self.joins, "refused": self.refused, "gone": self.gone, "left": self.left}
        yield from counters("joined", "Training runs that joined", counts)


async def _open_chat(request: JoinRequest) -> HFChatFormat:
    """The chat format of a run's model. Raises ConfigError where it is not exactly that of the trainer."""
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers", "train")
    with TemporaryDirectory(prefix="agl-joined-") as directory:
        try:
            packed = base64.b64decode(request.tokenizer, validate=True)
        except binascii.Error as error:
            raise ConfigError(f"the tokenizer's archive is not base64: {error}") from error
        await asyncio.to_thread(unpack_tokenizer, packed, Path(directory))
        chat = await load_chat_format(directory, request.tool_calls, request.eos_token_ids)
        probe = await asyncio.to_thread(probe_tokens, chat)
    if tuple(probe) != request.probe or chat.eos_token_ids != frozenset(request.eos_token_ids):
        raise ConfigError(
            "this server's tokenizer gives other tokens than the trainer's: it has another version of transformers or"
            " tokenizers; install the trainer's"
        )
    return chat


def _as_join_error(error: AgentLightningError) -> JoinError:
    if isinstance(error, JoinError):
        return error
    message = f"this server cannot sample from the policy: {error}"
    return JoinError(503 if isinstance(error, ModelServerError) and error.retryable else 422, message)


def _counts(*statuses: JoinStatus) -> dict[str, float]:
    return {name: sum(getattr(status, name) for status in statuses) for name in COUNTS}
