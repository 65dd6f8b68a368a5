"""The settings of training on several processes. Imports no torch."""

from __future__ import annotations

import os
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from agentlightning.errors import ConfigError

TOKEN: Final = "AGL_RANK_TOKEN"
"""The environment variable with the secret that the trainer and the ranks that join it share."""


class RanksConfig(BaseModel):
    """The processes that train, called ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    processes: int = Field(default=1, ge=1)
    """How many there are, on all machines."""
    address: str | None = None
    """HOST:PORT where this process waits for ranks that are started elsewhere. None: it starts them itself."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """How long a rank waits for another, and this process for ranks to join."""
    device: str = "auto"
    """Of the ranks: cpu, cuda, or auto, which takes the accelerator that each rank has."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Where ranks join; port 0: any free one. Raises ConfigError."""
        return ("127.0.0.1", 0) if self.address is None else parse_address(self.address)

    def token(self) -> bytes:
        """What ranks that join have to know. Raises ConfigError where it is not set."""
        return os.urandom(32).hex().encode() if self.address is None else shared_token()


def parse_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address of a trainer; give HOST:PORT, such as 0.0.0.0:29400")
    return host, int(port)


def shared_token() -> bytes:
    """The secret in the environment. Raises ConfigError where there is none."""
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"the environment variable {TOKEN} is not set; give the trainer and every rank that joins the same secret"
        )
    return token.encode()


def check_fed(processes: int, trees: int, settings: str) -> None:
    """Raises ConfigError for more ranks than the trees of a batch, each of which one rank computes. `settings` is where
    their number comes from."""
    if processes > trees:
        raise ConfigError(
            f"policy.processes={processes}: an update has {trees} trees at most ({settings}), each computed by one"
            f" process; use at most {trees} processes, or larger batches"
        )
