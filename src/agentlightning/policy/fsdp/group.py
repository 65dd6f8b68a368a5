"""The ranks as the trainer's process sees them: it starts or awaits them, sends each command to all, and collects their
answers. When one of them ends or fails alone, the group is over and the error names it; nobody waits for the others.

The trainer is no rank itself. A collective that waits for a rank that is gone cannot be left: with NCCL the process
ends with it, and with it would the store, the gateway and the reason. Ranks can be ended from outside. So the trainer
also needs no accelerator, and ranks keep the numbers that their launcher has given them.

A rank joins with `Hello` and is answered with `Welcome`, or with the reason why it cannot join. From then on it gets
commands, (method of `RankLearner`, arguments), and answers each of them with one `Reply`. The arguments go to rank 0
alone, which passes them on. They are pickled: a peer is trusted once it has proven that it knows the token.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any, Final

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, RankError
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.config import TOKEN, LocalPolicyConfig, parse_address, shared_token

logger = logging.getLogger(__name__)

MODULE: Final = "agentlightning.policy.fsdp.rank"
STDERR: Final = 2
POLL_SECONDS: Final = 0.5
CLOSE_SECONDS: Final = 5.0
"""How long ranks may take to end by themselves."""
GRACE_SECONDS: Final = 10.0
"""After a rank has failed: time for the others to fail as well, or to turn out to have ended."""
SAY_SECONDS: Final = 15.0
"""Interval of messages about ranks that are awaited."""
OPENING: Final = "opening the model"
RESUME: Final = "the run continues from its last checkpoint when it is resumed"

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


# -- group -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Member:
    """A rank and the connection to it."""

    hello: Hello
    connection: Connection
    rank: int = -1
    count: int = 0

    def __str__(self) -> str:
        process = f"process {self.hello.pid} on {self.hello.host}"
        return process if self.rank < 0 else f"rank {self.rank} of {self.count} ({process})"

    @property
    def has_ended(self) -> bool:
        """Of one that is not welcome yet: until then, it has nothing to say."""
        try:
            return self.connection.poll()
        except OSError:
            return True


class RankGroup:
    """Make it with `RankGroup.open`. Calls block, from any thread."""

    def __init__(self, members: Sequence[Member] = (), processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        """`processes`: those of its members that this one has started."""
        self.members = list(members)
        self._processes = list(processes)
        self._lock = threading.Lock()
        self._over: str | None = None
        self._store: Any = None

    @classmethod
    def open(cls, config: LocalPolicyConfig) -> RankGroup:
        """Start the ranks of `config`, or wait for them to join, and tell them what to train; see `check`. Raises
        RankError for a rank that ends or does not come, and ConfigError, with its name, for one that cannot take
        part."""
        group = cls()
        token = os.urandom(32).hex().encode() if config.address is None else shared_token()
        host, port = ("127.0.0.1", 0) if config.address is None else parse_address(config.address)
        try:
            with _listen(host, port) as listener:
                if config.address is None:
                    group._processes = _started(config.processes, listener.getsockname()[1], token, config.threads)
                group._await(config, listener, token)
            group._welcome(config, host)
        except BaseException as error:
            for each in group.members if isinstance(error, ConfigError) else ():
                with suppress(OSError):
                    each.connection.send(str(error))
            group.close()
            raise
        return group

    def check(self, digest: str, model: str) -> None:
        """Wait until all ranks have loaded the model. Raises as `call`, and ConfigError, with its name, for a rank with
        another model than this process, whose model has `digest`."""
        digests = self._collect(OPENING)
        for member, found in zip(self.members, digests, strict=True):
            if found != digest:
                raise ConfigError(
                    f"{member} has loaded another model under {model}: its weights or their shapes ({found}) differ"
                    f" from those of the trainer ({digest}); give all machines the same files"
                )

    def call(self, name: str, *arguments: Any, on_part: Callable[..., None] | None = None) -> Any:
        """The answer of rank 0 to a command; `on_part` is called with each tuple that it sends before. Raises what all
        ranks raised alike, and RankError for one that ended or failed alone; the group is then over."""
        with self._lock:
            if self._over is not None:
                raise RankError(self._over)
            for member in self.members:
                self._send(member, (name, arguments if member.rank == 0 else None), name)
            return self._collect(name, on_part)[0]

    def close(self) -> None:
        """End the ranks. Idempotent."""
        for member in self.members:
            with suppress(OSError):
                member.connection.send(None)
        self._end("the policy is closed; open it again", CLOSE_SECONDS)

    # -- joining ---------------------------------------------------------------------------------------------------

    def _await(self, config: LocalPolicyConfig, listener: socket.socket, token: bytes) -> None:
        """Wait until all ranks have joined."""
        arrived: queue.SimpleQueue[Member | None] = queue.SimpleQueue()

        def greet(accepted: socket.socket) -> None:
            try:
                connection = authenticate(accepted, token, listens=True)
                arrived.put(Member(connection.recv(), connection))
            except (ConfigError, EOFError, OSError):
                arrived.put(None)

        begun = said = time.monotonic()
        strangers = 0
        while len(self.members) < config.processes:
            now = time.monotonic()
            if ended := [each for each in self._processes if each.poll() is not None]:
                raise RankError(
                    f"a training process {_how_ended(ended[0])} before it had joined; its last words are above"
                )
            if now - begun > config.rank_timeout_seconds:
                raise RankError(
                    f"{len(self.members)} of {config.processes} ranks have joined in {config.rank_timeout_seconds:g}"
                    f" seconds ({strangers} connections had no valid token); start the others, or set policy.processes"
                )
            if now - said > SAY_SECONDS:
                said = now
                logger.warning("%d of %d ranks have joined", len(self.members), config.processes)
            with suppress(TimeoutError):
                # A thread for each: one that says nothing keeps no other waiting.
                threading.Thread(target=greet, args=(listener.accept()[0],), daemon=True).start()
            while not arrived.empty():
                if (new := arrived.get()) is None:
                    strangers += 1
                elif not new.has_ended:
                    # Its launcher may have started another one again.
                    self.members = [each for each in self.members if not each.has_ended] + [new]
                    if differs := difference(code(), new.hello.code):
                        raise ConfigError(
                            f"{new} cannot be a rank: it runs {differs}; install the same version on all machines"
                        )

    def _welcome(self, config: LocalPolicyConfig, host: str) -> None:
        """Tell each rank its place."""
        import torch.distributed as dist

        self.members = number(self.members)
        listener = _listen(host, 0)
        port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=config.rank_timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        for member in self.members:
            beside = [each for each in self.members[: member.rank] if each.hello.host == member.hello.host]
            local_rank = len(beside) if member.hello.local_rank is None else member.hello.local_rank
            self._send(member, Welcome(member.rank, local_rank, member.count, port, config), OPENING)

    # -- commands --------------------------------------------------------------------------------------------------

    def _send(self, member: Member, message: Any, name: str) -> None:
        try:
            member.connection.send(message)
        except OSError:
            raise self._lost(member, name) from None

    def _collect(self, name: str, on_part: Callable[..., None] | None = None) -> list[Any]:
        """The values of the ranks. Raises as `call`."""
        pending = {member.connection: member for member in self.members}
        replies: dict[Member, Reply] = {}
        until = float("inf")
        while pending and time.monotonic() < until:
            for connection in self._readable(list(pending)):
                member = pending[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    raise self._lost(member, name) from None
                if not isinstance(message, Reply):
                    assert on_part is not None
                    on_part(*message)
                    continue
                replies[pending.pop(connection)] = message
                if message.failure is not None:
                    until = min(until, time.monotonic() + GRACE_SECONDS)
        failures = {member: replies[member].failure for member in self.members if member in replies}
        failed = {member: failure for member, failure in failures.items() if failure is not None}
        if not failed and not pending:
            return [replies[member].value for member in self.members]
        raise self._failed(failed, list(pending.values()), name)

    def _readable(self, connections: list[Connection]) -> list[Any]:
        try:
            return wait(connections, timeout=POLL_SECONDS)
        except (OSError, ValueError) as error:  # `close` was called meanwhile.
            raise RankError(self._over or str(error)) from None

    def _failed(self, failed: dict[Member, Failure], silent: Sequence[Member], name: str) -> AgentLightningError:
        member, failure = next(iter(failed.items()))
        alike = len(failed) == len(self.members) and len(set(failed.values())) == 1
        if alike and (error := failure.error) is not None:
            return error
        waits = f"; no answer from {', '.join(map(str, silent))}" if silent else ""
        return self._end(f"{member} failed during {name!r}: {failure.kind}: {failure.message}{waits}; {RESUME}")

    def _lost(self, member: Member, name: str) -> RankError:
        how = "closed its connection"
        for process in self._processes:
            if process.pid == member.hello.pid:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(CLOSE_SECONDS)
                    how = _how_ended(process)
        return self._end(f"{member} {how} during {name!r}; {RESUME}")

    def _end(self, reason: str, seconds: float = 0.0) -> RankError:
        """Let no rank go on alone, after `seconds` in which those started here may end by themselves."""
        self._over = self._over or reason
        for member in self.members:
            member.connection.close()
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._store = None
        return RankError(reason)


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise ConfigError(f"policy.address={host}:{port} cannot be listened on: {error}") from error
    listener.settimeout(POLL_SECONDS)
    return listener


def _started(count: int, port: int, token: bytes, threads: int) -> list[subprocess.Popen[bytes]]:
    """Processes of this machine that join this one, and talk to one another over loopback. Each is in a session of its
    own, so that Ctrl-C reaches the trainer alone, and ends when its connection does."""
    # This process listens already: one that does not find it has outlived it.
    command = [sys.executable, "-m", MODULE, f"127.0.0.1:{port}", "--timeout", "0"]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    environment = {**loopback, "OMP_NUM_THREADS": str(threads), **os.environ, TOKEN: token.decode()}
    return [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            start_new_session=True,
        )
        for rank in range(count)
    ]


def _how_ended(process: subprocess.Popen[bytes]) -> str:
    status = process.returncode
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"


def number(members: Sequence[Member]) -> list[Member]:
    """The members in order: as their launchers have numbered them, then the others, machine by machine. Raises
    ConfigError for numbers that are not the first ones, each once."""
    given = [(each.hello.rank is None, each.hello.rank or 0, each.hello.host) for each in members]
    ordered = [members[i] for i in sorted(range(len(members)), key=given.__getitem__)]
    for rank, member in enumerate(ordered):
        if member.hello.rank not in (None, rank):
            raise ConfigError(
                f"{member} is rank {member.hello.rank}, and policy.processes={len(ordered)}: start the ranks from 0 to"
                f" {len(ordered) - 1}, each once, or leave RANK out"
            )
        member.rank, member.count = rank, len(ordered)
    return ordered
