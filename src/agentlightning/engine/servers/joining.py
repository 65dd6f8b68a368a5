"""What a training run and the gateways that it joins say to each other: JSON over HTTP, under /v1/policies.

    POST /v1/policies/MODEL/check      `CheckRequest`: could the run join, before it changes any weights?
    POST /v1/policies/MODEL            join: `JoinRequest` -> `JoinStatus`; again after the gateway was restarted
    POST /v1/policies/MODEL/pause      `PauseRequest`: hold calls back; to be repeated until `paused`
    POST /v1/policies/MODEL/announce   `AnnounceRequest`: servers are about to get these weights, or have these adapters
    POST /v1/policies/MODEL/resume     `RunRequest`: they have them; let calls go on
    POST /v1/policies/MODEL/renew      `RunRequest`: the run is alive
    POST /v1/policies/MODEL/leave      `RunRequest`: it has ended

Every answer is a `JoinStatus`, and every request but the join may be repeated. An error is `{"error": message}`: 401
for the token, 404 if the run has not joined, 409 if the name or the model servers belong to another run, 422 for what
the gateway lacks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentlightning.engine.adapter_view import AdapterTable
from agentlightning.engine.base import OnTokens, Sample, SamplingParams
from agentlightning.engine.servers.pool import ReplicaPool
from agentlightning.errors import AgentLightningError

PROTOCOL: Final = 2
"""Raised with each change that an earlier version would misunderstand."""
BASE_PATH: Final = "/v1/policies"
RENEW_SECONDS: Final = 2.0
"""A run renews its lease so often, and joins again within this time where a gateway was started again."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunRequest(_Message):
    """A request of a run that has joined."""

    run_id: str


class CheckRequest(RunRequest):
    """What a run is about to use."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Its model servers."""
    changes_weights: bool
    """False: the run adds adapters, and the weights below them stay."""


class ServedAdapter(_Message):
    """One version of an adapter, as the model servers have it."""

    name: str
    """The same for all versions."""
    served_name: str
    """What the servers call this version."""
    version: int


class JoinRequest(RunRequest):
    """What a gateway needs in order to sample from the policy of a run."""

    protocol: int
    package: str
    """The run's version of agentlightning."""
    kind: str = Field(pattern=r"^[\w-]+$")
    """The engine by its name. A gateway imports no module that a request names."""
    urls: tuple[str, ...] = Field(min_length=1)
    """The model servers, which the gateway must reach under these addresses."""
    server_token: str | None = None
    context_length: int
    retries: int
    wait_seconds: float
    timeout_seconds: float
    crosses_updates: bool
    """Whether answers may go on across an update. Servers must then say which weights sampled which tokens."""
    label: str | None
    """The label of the weights that the servers have; None: these stay as they are, and adapters change."""
    version: int
    adapters: tuple[ServedAdapter, ...] = ()
    """The adapters that the servers have."""
    adapter_routes: AdapterTable | None = None
    """None: the policy has no adapters."""
    structured_output: Literal["auto", "always", "never"] = "auto"
    """`gateway.structured_output` of the run."""
    record_top_logprobs: int = 0
    """`gateway.record_top_logprobs` of the run."""
    lease_seconds: float = Field(gt=0)
    """After so long without a request of the run, its calls are refused."""
    tokenizer: str
    """The tokenizer's archive, in base64."""
    tool_calls: str | None
    """The format of tool calls, if it has a name."""
    eos_token_ids: tuple[int, ...]
    probe: tuple[int, ...]
    """The tokens of `tokenizer_archive.PROBE`."""


class PauseRequest(RunRequest):
    """A weight update begins."""

    in_flight: bool
    drain_seconds: float | None


class AnnounceRequest(RunRequest):
    """New weights, before any server has them, or new adapters, once servers have them."""

    label: str | None = None
    """None: the weights stay."""
    version: int = 0
    adapters: tuple[ServedAdapter, ...] = ()


class JoinStatus(_Message):
    """What a gateway has done for a run since it joined."""

    calls: int = 0
    """Answers sampled."""
    tokens: int = 0
    """Tokens of these answers."""
    failed: int = 0
    """Calls that failed."""
    held: int = 0
    """Calls that waited for an update."""
    updates: int = 0
    held_seconds: float = 0.0
    """Time in which calls were held back."""
    paused: bool = False
    going_on: int = 0
    """While paused, the calls that go on across the update."""
    adapters: tuple[str, ...] = ()
    """The served names of adapters that calls in progress use."""


# -- adapter versions ------------------------------------------------------------------------------------------------

# The versions of adapters that are trained: what servers call each of them, and when a version leaves the servers.
#
# Each version is an adapter of its own to the servers, named `AGENT@VERSION.RUN`, where RUN tells runs on one server
# apart. A call keeps the version it began with, on whichever server it continues, so no token is sampled from keys and
# values of other weights. A replaced version is unloaded, and its files removed, when the last call that uses it ends.

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long servers that we joined have to unload the adapters at the end."""


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One version of an adapter, on the servers."""

    served_name: str
    version: int
    directory: Path = Path()
    """Of its files, where this process has them."""
    calls: int = 0
    """Number of calls that use it."""


OnNewAdapter = Callable[[str, AdapterVersion], Awaitable[None]]


class AdapterVersions:
    """The adapters of a policy on the servers of a pool."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._run = secrets.token_hex(3)
        self._current: dict[str, AdapterVersion] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._replaced: dict[str, AdapterVersion] = {}
        """Versions that calls may still use, by served name."""
        self.on_new: OnNewAdapter | None = None
        """Called with a new version once servers have it, before calls use it."""
        self.used_elsewhere: Callable[[], Collection[str]] = tuple
        """The served names that calls of other processes use."""

    @property
    def current(self) -> Mapping[str, AdapterVersion]:
        """The newest version of each adapter, by name."""
        return self._current

    @property
    def newest(self) -> int:
        """The largest version of any adapter."""
        return max((each.version for each in self._current.values()), default=0)

    @property
    def in_use(self) -> tuple[str, ...]:
        """The served names of the adapters that calls in progress use."""
        every = [*self._current.values(), *self._replaced.values()]
        return tuple(sorted(each.served_name for each in every if each.calls))

    def version_of(self, name: str | None) -> int:
        """See `AgentEngines.version_of`: the weights below adapters never change."""
        return 0 if name is None else self._current[name].version

    async def publish(self, name: str, version: int, directory: Path, *, strict: bool = False) -> None:
        """Let calls that begin from now on use this version, which is in `directory`. Servers that are down load it
        before they sample again. Raises as `ReplicaPool.set_adapter`."""
        new = AdapterVersion(f"{name}@{version}.{self._run}", version, directory)
        await self._pool.set_adapter(new.served_name, directory, strict=strict)
        if self.on_new is not None:
            await self.on_new(name, new)
        self._use(name, new)

    def _use(self, name: str, new: AdapterVersion) -> None:
        old, self._current[name] = self._current.get(name), new
        if old is not None:
            self._replaced[old.served_name] = old
            self.remove_unused()

    async def sample(
        self,
        name: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
    ) -> Sample:
        """`ReplicaPool.sample_adapter` from the newest version."""
        used = self._current[name]
        used.calls += 1
        try:
            sample = await self._pool.sample_adapter(
                used.served_name, prompt_token_ids, params, on_tokens, affinity=affinity
            )
        finally:
            used.calls -= 1
            self.remove_unused()
        return replace(sample, policy_version=used.version)

    def remove_unused(self) -> None:
        """Unload the replaced versions that no call uses."""
        elsewhere = self.used_elsewhere() if self._replaced else ()
        for name in [name for name, old in self._replaced.items() if not old.calls and name not in elsewhere]:
            self._drop(self._replaced.pop(name))

    def _drop(self, old: AdapterVersion) -> None:
        task = asyncio.create_task(self._remove(old))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _remove(self, old: AdapterVersion) -> None:
        try:
            await self._pool.unload_adapter(old.served_name)
        except AgentLightningError as error:  # It takes memory until the server ends, and answers no call.
            log.warning("the adapter %s could not be unloaded: %s", old.served_name, error)
        await asyncio.to_thread(shutil.rmtree, old.directory, ignore_errors=True)

    async def close(self) -> None:
        """Unload all adapters from servers that go on without us. The pool must still be open."""
        await asyncio.gather(*self._removals, return_exceptions=True)
        current, self._current = [*self._current.values(), *self._replaced.values()], {}
        if all(replica.process is not None for replica in self._pool.replicas):
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for each in current:
                    await self._pool.unload_adapter(each.served_name)
        except (TimeoutError, AgentLightningError) as error:
            log.warning("the adapters of this run could not be unloaded: %s", error)
