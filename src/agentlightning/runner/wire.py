"""What a runner, its zygote and its agent hosts say to each other: pickled, each message after its length.

Pickle is fair here: every party is a process of the same user, started by the same runner, over a socket pair.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import Failure
from agentlightning.resources import NamedResources
from agentlightning.rollouts import AttemptedRollout
from agentlightning.runner.spec import AgentSpec, Pickled, Reference
from agentlightning.span import Span

# -- runner to zygote ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """The first message: what to import, and how to run it."""

    agent: AgentSpec
    reward: Reference | Pickled | None
    sys_path: tuple[str, ...]
    slots: int
    """Attempts one host runs at once."""
    environment: Mapping[str, str] | None
    """Environment variable -> the field of a dict task it holds; None: each field under its name in upper case."""
    grace: float
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the environment holds besides while the agent is imported."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Make a host. Its end of a socket pair travels with the message."""

    host_id: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL for a host."""

    host_id: int


# -- zygote to runner ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """The agent is imported; forks may be asked for."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The agent cannot be had."""

    message: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A host has ended."""

    host_id: int
    status: int
    """A return code as `subprocess` has it: negative for a signal."""
    traceback: str
    """What `faulthandler` wrote, if it was a fault."""


# -- runner to host --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """Run one attempt."""

    job_id: int
    rollout: AttemptedRollout
    resources: NamedResources
    server_url: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop one attempt; nobody waits for its result, only for its end."""

    job_id: int


# -- host to runner --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The host takes jobs."""

    pid: int


@dataclass(frozen=True, slots=True)
class Started:
    """The host has begun an attempt. One it never began is not hurt by the host's end."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Spans:
    """What an attempt has emitted."""

    job_id: int
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Stopping:
    """The host has heard that an attempt is to stop: its event loop is alive."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Done:
    """An attempt has ended; all its spans were sent before."""

    job_id: int
    failure: Failure | None = None
    output: Any = None
    """What the agent returned, as a JSON value, shortened; None where that was its reward."""


# -- framing ---------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("!Q")


def encode(message: Any) -> bytes:
    """One message, ready to be written."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with these bytes."""
        self._data += data
        start = 0
        while (end := self._end(start)) is not None:
            body = bytes(memoryview(self._data)[start + _LENGTH.size : end])
            start = end
            yield pickle.loads(body)
        del self._data[:start]

    def _end(self, start: int) -> int | None:
        if len(self._data) - start < _LENGTH.size:
            return None
        end = start + _LENGTH.size + _LENGTH.unpack_from(self._data, start)[0]
        return end if end <= len(self._data) else None
