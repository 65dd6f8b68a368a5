"""What a training run and the gateways that it joins say to each other: JSON over HTTP, under /v1/policies.

    POST /v1/policies/MODEL/check      `CheckRequest`: could the run join, before it changes any weights?
    POST /v1/policies/MODEL            join: `JoinRequest` -> `JoinStatus`; again after the gateway was restarted
    POST /v1/policies/MODEL/state      `StateRequest`: hold calls back, or let them go on; repeated while a run lives
    POST /v1/policies/MODEL/leave      `RunRequest`: it has ended

Every answer is a `JoinStatus`, and every request but the join may be repeated. Errors are those of the store: 401 for
the token, 404 if the run has not joined, 409 if the name or the model servers belong to another run, 422 for what
the gateway lacks.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat

from agentlightning.engine.base import AdapterTable
from agentlightning.engine.servers.clients.http import server_url
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.util.settings import Section

BASE_PATH = "/v1/policies"
RENEW_SECONDS = 2.0
"""A run renews its lease so often, and joins again within this time where a gateway was started again."""


COUNTS = ("calls", "tokens", "failed", "held", "updates", "held_seconds")
"""What gateways count for a run: answers sampled, and their tokens; calls that failed, and that waited for an update;
updates, and the seconds in which calls were held back."""


class RunRequest(Section):
    """A request of a run that has joined."""

    run_id: str
    package: str = version("agentlightning")
    """The run's version of agentlightning, which must be that of the gateway."""


class CheckRequest(RunRequest):
    """What a run is about to use."""

    urls: tuple[Annotated[str, AfterValidator(server_url)], ...]
    """Its model servers."""
    changes_weights: bool
    """False: the run adds adapters, and the weights below them stay."""
    views: tuple[str, ...] = ()
    """Its other model names, if they are known."""


class ServedAdapter(Section):
    """One version of an adapter, as the model servers have it."""

    name: str
    """The same for all versions."""
    served_name: str
    """What the servers call this version."""
    version: int


class StateRequest(RunRequest):
    """What the model servers have, and whether it changes. A gateway answers calls with this and nothing else."""

    label: str | None
    """The label of the weights; None: these stay as they were started, and adapters change."""
    version: int
    adapters: tuple[ServedAdapter, ...] = ()
    paused: bool = False
    """Hold calls back: an update is under way. To be repeated until the gateway is `paused`."""


class JoinRequest(StateRequest):
    """What a gateway needs in order to sample from the policy of a run."""

    kind: str = Field(pattern=r"^[\w-]+$")
    """The engine by its name. A gateway imports no module that a request names."""
    servers: ServersConfig
    """The model servers, which the gateway must reach under their `urls`."""
    server_token: str | None = None
    context_length: int
    in_flight: bool
    drain_seconds: float | None
    """How calls are held back; see `UpdateGate.update`. Where answers may go on across an update, servers must say
    which weights sampled which tokens."""
    adapter_routes: AdapterTable = AdapterTable()
    structured_output: Literal["auto", "always", "never"] = "auto"
    """`gateway.structured_output` of the run."""
    record_top_logprobs: int = 0
    """`gateway.record_top_logprobs` of the run."""
    lease_seconds: PositiveFloat
    """After so long without a request of the run, its calls are refused."""
    tokenizer: str
    """The tokenizer's archive, in base64."""
    tool_calls: str | None
    """The format of tool calls, if it has a name."""
    eos_token_ids: frozenset[int]
    probe: list[int]
    """The tokens of `chat.hf.PROBE`."""

    @property
    def check(self) -> CheckRequest:
        """The request that asks whether the run could join."""
        urls, views = self.servers.urls, tuple(self.adapter_routes.views)
        return CheckRequest(run_id=self.run_id, urls=urls, changes_weights=self.label is not None, views=views)


class JoinStatus(Section):
    """What a gateway has done for a run since it joined."""

    counts: dict[str, int | float] = dict.fromkeys(COUNTS, 0)
    """Of `COUNTS`."""
    paused: bool = False
    going_on: int = 0
    """While paused, the calls that go on across the update."""
    adapters: tuple[str, ...] = ()
    """The served names of adapters that calls in progress use."""
