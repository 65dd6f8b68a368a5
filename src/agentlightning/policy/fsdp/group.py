"""The ranks as the trainer's process sees them: it starts or awaits them, sends each command to all, and collects their
answers. When one of them ends or fails alone, the group is over and the error names it; nobody waits for the others.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from agentlightning.errors import ConfigError, RankError
from agentlightning.policy.fsdp.config import TOKEN, RanksConfig
from agentlightning.policy.fsdp.messages import (
    Command,
    Failure,
    Hello,
    Refusal,
    Reply,
    TensorHeader,
    Welcome,
    authenticate,
    code,
    receive_tensor,
)
from agentlightning.policy.fsdp.rank import CLOSE
from agentlightning.policy.local_config import LocalPolicyConfig

# -- started ---------------------------------------------------------------------------------------------------------

# The ranks that the trainer's process has started on its own machine.

MODULE: Final = "agentlightning.policy.fsdp.rank"
CLOSE_SECONDS: Final = 5.0
"""How long ranks may take to end by themselves."""
STDERR: Final = 2


class StartedRanks:
    """Processes that join this one. Each is in a session of its own, so that Ctrl-C reaches the trainer alone, and ends
    when its connection does."""

    def __init__(self, count: int, port: int, token: bytes, threads: int) -> None:
        # This process listens already: one that does not find it has outlived it.
        command = [sys.executable, "-m", MODULE, f"127.0.0.1:{port}", "--timeout", "0"]
        environment = _environment(os.environ, token, threads)
        self._processes = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                start_new_session=True,
            )
            for rank in range(count)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def first_end(self) -> str | None:
        """How the first that has ended did so, in words; None while all run."""
        return next((_words(each) for each in self._processes if each.poll() is not None), None)

    def how_ended(self, pid: int) -> str | None:
        """How a process has ended, in words; None where it still runs after a moment."""
        process = next((each for each in self._processes if each.pid == pid), None)
        if process is None:
            return None
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return _words(process)

    def stop(self, *, gently: bool) -> None:
        """End all that run, at once or with the time to end by themselves."""
        deadline = time.monotonic() + (CLOSE_SECONDS if gently else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(given: Mapping[str, str], token: bytes, threads: int) -> dict[str, str]:
    """Of a rank on this machine, which talks to the others over loopback."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**loopback, "OMP_NUM_THREADS": str(threads), **given, TOKEN: token.decode()}


def _words(process: subprocess.Popen[bytes]) -> str:
    status = process.returncode
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.5
GRACE_SECONDS: Final = 10.0
"""After a rank has failed: time for the others to fail as well, or to turn out to have ended."""
SAY_SECONDS: Final = 15.0
"""Interval of messages about ranks that are awaited."""
RESUME: Final = "the run continues from its last checkpoint when it is resumed"


@dataclass(slots=True, eq=False)
class Member:
    """A rank and the connection to it."""

    hello: Hello
    connection: Connection
    rank: int
    count: int
    local_rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.count} (process {self.hello.pid} on {self.hello.host})"


class RankGroup:
    """Make it with `RankGroup.open`. Calls block, from any thread."""

    def __init__(self, members: Sequence[Member], started: StartedRanks | None, folder: Path | None) -> None:
        self.members = list(members)
        self._started, self._folder = started, folder
        self._lock = threading.Lock()
        self._over: str | None = None
        self._store: Any = None

    @classmethod
    def open(cls, config: LocalPolicyConfig, digest: Callable[[], str]) -> RankGroup:
        """Start the ranks of `config`, or wait for them to join, until all have loaded its model. `digest` is of the
        model as this process has loaded it. Raises RankError for a rank that ends or does not come, and ConfigError or
        PolicyError, with its name, for one that cannot take part."""
        assert config.ranks is not None
        settings, token = config.ranks, config.ranks.token()
        listener = _listen(settings)
        started = None
        if settings.address is None:
            started = StartedRanks(settings.processes, listener.getsockname()[1], token, config.threads)
        group = cls((), started, None)
        try:
            hellos = _Joining(settings, listener, token, started).run()
            group.members = _numbered(hellos)
            group._welcome(config)
            group._compare(digest, config)
        except BaseException:
            group.close()
            raise
        finally:
            listener.close()
        return group

    def call(self, name: str, *arguments: Any, on_tensor: Callable[[TensorHeader, Tensor], None] | None = None) -> Any:
        """The answer of rank 0 to a command. Raises what all ranks raised alike, and RankError for one that ended or
        failed alone; the group is then over."""
        with self._lock:
            if self._over is not None:
                raise RankError(self._over)
            for member in self.members:
                try:
                    member.connection.send(Command(name, arguments if member.rank == 0 else None))
                except OSError:
                    raise self._lost(member, name) from None
            return self._answer(name, self._collect(name, on_tensor))

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._over = self._over or "the policy is closed; open it again"
        for member in self.members:
            try:
                member.connection.send(Command(CLOSE))
            except OSError:
                continue
        self._end()

    # -- joining ---------------------------------------------------------------------------------------------------

    def _welcome(self, config: LocalPolicyConfig) -> None:
        """Tell each rank its place."""
        assert config.ranks is not None
        if self._started is not None:
            self._folder = Path(tempfile.mkdtemp(prefix="agl-ranks-"))
            store: str | int = str(self._folder / "store")
        else:
            import torch.distributed as dist

            wait_time = timedelta(seconds=config.ranks.timeout_seconds)
            host = config.ranks.endpoint[0]
            self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                host, 0, is_master=True, timeout=wait_time, wait_for_workers=False
            )
            store = int(self._store.port)
        for each in self.members:
            try:
                each.connection.send(Welcome(each.rank, each.local_rank, each.count, store, config))
            except OSError:
                raise self._lost(each, "joining") from None

    def _compare(self, digest: Callable[[], str], config: LocalPolicyConfig) -> None:
        """Raises ConfigError for a rank with another model than this process."""
        replies = self._collect("opening the model")
        for member in self.members:
            if (failure := replies[member.rank].failure) is not None:
                raise type(failure.exception())(f"{member}: {failure.message}")
        own = digest()
        for member in self.members:
            if (found := replies[member.rank].value) != own:
                raise ConfigError(
                    f"{member} has loaded another model under {config.model}: its weights or their shapes ({found})"
                    f" differ from those of the trainer ({own}); give all machines the same files"
                )

    # -- commands --------------------------------------------------------------------------------------------------

    def _collect(
        self, name: str, on_tensor: Callable[[TensorHeader, Tensor], None] | None = None
    ) -> Mapping[int, Reply]:
        """The answers by rank; where one failed, those that came soon after."""
        pending = {member.connection: member for member in self.members}
        replies: dict[int, Reply] = {}
        until: float | None = None
        while pending and (until is None or time.monotonic() < until):
            for connection in self._readable(list(pending)):
                assert isinstance(connection, Connection)
                member = pending[connection]
                try:
                    message = connection.recv()
                    if isinstance(message, TensorHeader):
                        tensor = receive_tensor(connection, message)
                        if on_tensor is not None:
                            on_tensor(message, tensor)
                        continue
                except (EOFError, OSError):
                    raise self._lost(member, name) from None
                replies[member.rank] = message
                del pending[connection]
                if message.failure is not None and until is None:
                    until = time.monotonic() + GRACE_SECONDS
        if pending:
            raise self._failed(replies, list(pending.values()), name)
        return replies

    def _readable(self, connections: list[Connection]) -> list[Any]:
        try:
            return wait(connections, timeout=POLL_SECONDS)
        except (OSError, ValueError) as error:  # `close` was called meanwhile.
            raise RankError(self._over or str(error)) from None

    def _answer(self, name: str, replies: Mapping[int, Reply]) -> Any:
        failures = [reply.failure for reply in replies.values() if reply.failure is not None]
        if not failures:
            return replies[0].value
        alike = len({(each.kind, each.message) for each in failures}) == 1 and len(failures) == len(replies)
        if alike and failures[0].is_typed:
            raise failures[0].exception()
        raise self._failed(replies, [], name)

    def _lost(self, member: Member, name: str) -> RankError:
        how = None if self._started is None else self._started.how_ended(member.hello.pid)
        return self._end(f"{member} {how or 'closed its connection'} during {name!r}; {RESUME}")

    def _failed(self, replies: Mapping[int, Reply], silent: Sequence[Member], name: str) -> RankError:
        found = [(self.members[rank], reply.failure) for rank, reply in sorted(replies.items()) if reply.failure]
        first, failure = found[0]
        waits = f"; no answer from {', '.join(map(str, silent))}" if silent else ""
        return self._end(f"{first} failed during {name!r}: {_group_words(failure)}{waits}; {RESUME}")

    def _end(self, reason: str | None = None) -> RankError:
        """Let no rank go on alone."""
        self._over = self._over or reason
        for member in self.members:
            member.connection.close()
        if self._started is not None:
            self._started.stop(gently=reason is None)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._store = None
        return RankError(reason or "")


def _group_words(failure: Failure) -> str:
    return f"{failure.kind}: {failure.message}"


def _listen(settings: RanksConfig) -> socket.socket:
    try:
        listener = socket.create_server(settings.endpoint, backlog=settings.processes + 8)
    except OSError as error:
        raise ConfigError(f"policy.address={settings.address!r} cannot be listened on: {error}") from error
    listener.settimeout(POLL_SECONDS)
    return listener


class _Joining:
    """Waits until all ranks have joined."""

    def __init__(
        self, settings: RanksConfig, listener: socket.socket, token: bytes, started: StartedRanks | None
    ) -> None:
        self._settings, self._listener, self._token, self._started = settings, listener, token, started
        self._joined: list[tuple[Hello, Connection]] = []
        self._arrived: queue.SimpleQueue[tuple[Hello, Connection]] = queue.SimpleQueue()
        self._strangers = 0

    def run(self) -> list[tuple[Hello, Connection]]:
        try:
            self._wait()
        except BaseException:
            for _, connection in self._joined:
                connection.close()
            raise
        return self._joined

    def _wait(self) -> None:
        begun = said = time.monotonic()
        while len(self._joined) < self._settings.processes:
            now = time.monotonic()
            if self._started is not None and (ended := self._started.first_end()):
                raise RankError(f"a training process {ended} before it had joined; its last words are above")
            if now - begun > self._settings.timeout_seconds:
                raise RankError(
                    f"{len(self._joined)} of {self._settings.processes} ranks have joined in"
                    f" {self._settings.timeout_seconds:g} seconds ({self._strangers} connections had no valid token);"
                    " start the others, or set policy.processes"
                )
            if now - said > SAY_SECONDS:
                said = now
                logger.warning("%d of %d ranks have joined", len(self._joined), self._settings.processes)
            self._accept_one()

    def _accept_one(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except TimeoutError:
            pass
        else:
            # A thread for each: one that says nothing keeps no other waiting.
            threading.Thread(target=self._greet, args=(accepted,), daemon=True).start()
        while not self._arrived.empty():
            self._admit(*self._arrived.get())

    def _greet(self, accepted: socket.socket) -> None:
        connection = authenticate(accepted, self._token)
        if connection is None:
            self._strangers += 1
            return
        try:
            hello = connection.recv()
        except (EOFError, OSError):
            return
        self._arrived.put((hello, connection))

    def _admit(self, hello: Hello, connection: Connection) -> None:
        assert isinstance(hello, Hello)
        if _has_ended(connection):
            return
        if difference := code().difference(hello.code):
            reason = f"it runs {difference}; install the same version on all machines"
            connection.send(Refusal(reason))
            raise ConfigError(f"process {hello.pid} on {hello.host} cannot be a rank: {reason}")
        self._joined = [each for each in self._joined if not _has_ended(each[1])]  # Its launcher may start it again.
        if hello.rank is not None and hello.rank in {each.rank for each, _ in self._joined}:
            reason = f"there is a rank {hello.rank} already; start each number once, or leave RANK out"
            connection.send(Refusal(reason))
            raise ConfigError(f"process {hello.pid} on {hello.host} cannot be a rank: {reason}")
        self._joined.append((hello, connection))


def _has_ended(connection: Connection) -> bool:
    """Of a rank that has joined: until it is welcomed, it has nothing to say."""
    try:
        return connection.poll()
    except OSError:
        return True


def _numbered(joined: Sequence[tuple[Hello, Connection]]) -> list[Member]:
    """The ranks in order: as their launchers have numbered them, the others machine by machine. Raises ConfigError for
    a number beyond their count."""
    count = len(joined)
    if beyond := [hello for hello, _ in joined if hello.rank is not None and hello.rank >= count]:
        raise ConfigError(
            f"process {beyond[0].pid} on {beyond[0].host} is rank {beyond[0].rank}, and policy.processes={count}; start"
            " as many ranks as that"
        )
    taken = {hello.rank for hello, _ in joined}
    free = iter(rank for rank in range(count) if rank not in taken)
    order = sorted(joined, key=lambda each: each[0].host)
    placed = sorted(
        ((next(free) if hello.rank is None else hello.rank, hello, connection) for hello, connection in order),
        key=lambda each: each[0],
    )
    members: list[Member] = []
    for rank, hello, connection in placed:
        beside = sum(each.hello.host == hello.host for each in members)
        local_rank = beside if hello.local_rank is None else hello.local_rank
        members.append(Member(hello, connection, rank, count, local_rank))
    return members
