"""The request of one upstream call, and the parameters that decide its server, limits and price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentlightning.gateway.upstream.pricing import Price
from agentlightning.gateway.upstream.provider import ApiPath
from agentlightning.transport import Headers


@dataclass(slots=True)
class UpstreamRequest:
    """A request to a provider, on behalf of a rollout."""

    path: ApiPath | Literal["messages/count_tokens"]
    body: bytes
    stream: bool = False
    """Whether the response is passed on as it arrives. Other calls are retried even if their body breaks off, since the
    caller has seen nothing of it."""
    headers: Headers = ()
    """Sent in addition to the headers in the provider's configuration, which take precedence."""
    affinity: str = ""
    """Calls with the same key go to the same server while it is healthy: "rollout/attempt"."""
    rollout_id: str = ""
    """The rollout that pays; "" if unknown."""
    max_output_tokens: int | None = None
    """The output limit that the request sets, for all its choices together."""
    price: Price | None = None
    """The price of the route; None: the provider's."""
    model: str = ""
    """The provider's name of the model, which rate limits refer to."""
