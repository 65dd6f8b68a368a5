"""What the trainer's process and the ranks send one another, over connections that both ends authenticate.

A rank joins with `Hello` and is answered with `Welcome`, or with the reason why it cannot join. From then on it gets
commands, (method of `RankLearner`, arguments), and answers each of them with one `Reply`. The arguments go to rank 0
alone, which passes them on. They are pickled: a peer is trusted once it has proven that it knows the token.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, RankError
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.config import LocalPolicyConfig

# -- identity --------------------------------------------------------------------------------------------------------

# What the ranks of a group must have in common: their code and the model that they start from.

PACKAGES = ("agentlightning", "torch", "transformers", "numpy")
WEIGHTS = frozenset({".safetensors", ".bin"})
BLOCK, MOST_BLOCKS = 1024, 4096
"""Bytes of a block, and the blocks of a file, that are compared."""


@cache
def code() -> Mapping[str, str]:
    """The versions that this process runs, and a digest of the source files of this package."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {package: version(package) for package in PACKAGES}
    return {"python": python, **versions, "other source files of agentlightning": digest.hexdigest()}


def difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Where the code of another process differs, in words; empty where it does not."""
    return ", ".join(f"{name} {other.get(name)} and not {own[name]}" for name in own if other.get(name) != own[name])


def model_digest(source: str) -> str:
    """Of the files of a model: their sizes, and bytes spread over the weights. `source` as in `LocalPolicyConfig`."""
    directory = Path(resolve_model(source))
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(each for each in directory.iterdir() if each.name == "config.json" or each.suffix in WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(BLOCK, size // MOST_BLOCKS)):
                file.seek(place)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


# -- messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Who joins."""

    host: str
    pid: int
    code: Mapping[str, str]
    rank: int | None = None
    """The rank that its launcher has given it; None: the trainer chooses."""
    local_rank: int | None = None
    """Its number among the ranks of its machine, likewise."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Where a rank stands, and what it trains."""

    rank: int
    local_rank: int
    count: int
    port: int
    """Of the store on the trainer's machine by which the ranks find one another."""
    config: LocalPolicyConfig


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank."""

    kind: str
    """Its class."""
    message: str
    changed: bool = False
    """Whether weights had changed before it."""

    @property
    def error(self) -> AgentLightningError | None:
        """To raise in the trainer's process where it is an error of this package, which leaves a rank as it was."""
        found = getattr(errors, self.kind, None)
        if self.changed or not isinstance(found, type) or not issubclass(found, AgentLightningError):
            return None
        return (ConfigError if issubclass(found, errors.MissingExtraError) else found)(self.message)


@dataclass(frozen=True, slots=True)
class Reply:
    value: Any = None
    failure: Failure | None = None


# -- connections -----------------------------------------------------------------------------------------------------

HANDSHAKE_SECONDS = 20
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that is gone is noticed after 30 seconds."""
RETRY_SECONDS = 1.0


def authenticate(peer: socket.socket, token: bytes, *, listens: bool) -> Connection:
    """The connection to a peer that has proven that it knows the token, as this side has to it. Raises ConfigError for
    one that has not in HANDSHAKE_SECONDS. `listens`: whether the peer has connected to this process."""
    with peer:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE_SECONDS, 0))
        connection: Connection = Connection(os.dup(peer.fileno()))
        steps = (deliver_challenge, answer_challenge)
        try:
            for prove in steps if listens else reversed(steps):
                prove(connection, token)
        except (AuthenticationError, EOFError, OSError) as error:
            connection.close()
            raise ConfigError(f"the other side does not take the token: {error}; give both the same one") from error
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection


def connect(address: tuple[str, int], token: bytes, seconds: float) -> Connection:
    """The connection to a trainer, which may start later. Raises RankError where there is none after `seconds`, and
    ConfigError for a token that it does not take."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return authenticate(socket.create_connection(address, timeout=HANDSHAKE_SECONDS), token, listens=False)
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankError(
                    f"no trainer at {address[0]}:{address[1]} after {seconds:g} seconds: {error}"
                ) from error
            time.sleep(RETRY_SECONDS)
