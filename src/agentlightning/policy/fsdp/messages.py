"""What the trainer's process and the ranks send one another, over connections that both ends authenticate.

A rank joins with `Hello` and is answered with `Welcome`, or with `Refusal`. From then on it gets commands, and each
rank answers each of them with one `Reply`. The arguments of a command go to rank 0 alone, which passes them on. They
are pickled: a peer is trusted once it has proven that it knows the token.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import struct
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, RankError
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.local_config import LocalPolicyConfig

# -- identity --------------------------------------------------------------------------------------------------------

# What the ranks of a group must have in common: their code and the model that they start from.

PACKAGES = ("agentlightning", "torch", "transformers", "numpy")
WEIGHTS = frozenset({".safetensors", ".bin"})
BLOCK, MOST_BLOCKS = 1024, 4096
"""Bytes of a block, and the blocks of a file, that are compared."""


@dataclass(frozen=True, slots=True)
class Code:
    """What a process runs."""

    python: str
    packages: tuple[tuple[str, str], ...]
    digest: str
    """Of the source files of this package."""

    def difference(self, other: Code) -> str:
        """Where the other differs, in words; empty where it does not."""
        own, others = {"python": self.python, **dict(self.packages)}, {"python": other.python, **dict(other.packages)}
        found = [
            f"{name} {others.get(name)} and not {value}" for name, value in own.items() if others.get(name) != value
        ]
        if not found and self.digest != other.digest:
            found = [f"other source files of agentlightning ({other.digest} and not {self.digest})"]
        return ", ".join(found)


@cache
def code() -> Code:
    """That of this process."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return Code(_minor_version(), tuple((name, _version(name)) for name in PACKAGES), digest.hexdigest())


def _minor_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


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


HANDSHAKE_SECONDS = 20
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that is gone is noticed after 30 seconds."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Hello:
    """Who joins."""

    host: str
    pid: int
    code: Code
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
    store: str | int
    """How the ranks find one another: a file, or the port of the trainer's store."""
    config: LocalPolicyConfig


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    """A method of `RankLearner`."""
    arguments: tuple[Any, ...] | None = None
    """None: rank 0 has them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank."""

    kind: str
    """Its class."""
    message: str
    changed: bool
    """Whether weights had changed before it."""

    @classmethod
    def of(cls, error: BaseException, *, changed: bool = False) -> Failure:
        return cls(type(error).__name__, str(error), changed)

    @property
    def is_typed(self) -> bool:
        """Whether it is an error of this package, which leaves a rank as it was."""
        return isinstance(_class_of(self.kind), type) and not self.changed

    def exception(self) -> AgentLightningError:
        """To raise in the trainer's process."""
        found = _class_of(self.kind)
        return RankError(f"{self.kind}: {self.message}") if found is None else found(self.message)


def _class_of(kind: str) -> type[AgentLightningError] | None:
    found = getattr(errors, kind, None)
    if not isinstance(found, type) or not issubclass(found, AgentLightningError):
        return None
    return ConfigError if issubclass(found, errors.MissingExtraError) else found


@dataclass(frozen=True, slots=True)
class Reply:
    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor of rank 0, whose bytes follow."""

    owner: str
    """Which weights: MODEL, VALUE_HEAD, or those of an adapter (`adapter_owner`)."""
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def send_tensor(connection: Connection, owner: str, name: str, tensor: Tensor) -> None:
    values = tensor.detach().cpu().contiguous()
    connection.send(TensorHeader(owner, name, values.dtype, tuple(values.shape)))
    connection.send_bytes(values.flatten().view(torch.uint8).numpy().data)


def receive_tensor(connection: Connection, header: TensorHeader) -> Tensor:
    content = bytearray(connection.recv_bytes())
    return torch.frombuffer(content, dtype=header.dtype).reshape(header.shape)


def authenticate(accepted: socket.socket, token: bytes) -> Connection | None:
    """The connection of a peer that has proven that it knows the token; None for another, which may take
    HANDSHAKE_SECONDS to show."""
    connection = _as_connection(accepted)
    try:
        deliver_challenge(connection, token)
        answer_challenge(connection, token)
    except (AuthenticationError, EOFError, OSError):
        connection.close()
        return None
    _limit(connection, 0)
    return connection


def connect(address: tuple[str, int], token: bytes, seconds: float) -> Connection:
    """The connection to a trainer, which may start later. Raises RankError where there is none after `seconds`, and
    ConfigError for a token that it does not take."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = _as_connection(socket.create_connection(address, timeout=HANDSHAKE_SECONDS))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankError(
                    f"no trainer at {address[0]}:{address[1]} after {seconds:g} seconds: {error}"
                ) from error
            time.sleep(RETRY_SECONDS)
    try:
        answer_challenge(connection, token)
        deliver_challenge(connection, token)
    except (AuthenticationError, EOFError, OSError) as error:
        raise ConfigError(
            f"the trainer at {address[0]}:{address[1]} does not take the token: {error}; give both the same one"
        ) from error
    _limit(connection, 0)
    return connection


def _as_connection(accepted: socket.socket) -> Connection:
    """With a limit on the time that the other side may take to answer, until it has proven who it is."""
    accepted.settimeout(None)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection: Connection = Connection(accepted.detach())
    _limit(connection, HANDSHAKE_SECONDS)
    return connection


def _limit(connection: Connection, seconds: int) -> None:
    """How long a read may take; 0: any time."""
    borrowed = socket.socket(fileno=connection.fileno())
    try:
        borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
    finally:
        borrowed.detach()
