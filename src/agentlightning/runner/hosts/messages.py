"""What a runner, its zygote and its agent hosts say to each other: MessagePack, each message after its length.

Agents run in the hosts, and are imported in the zygote. So whatever comes from there is read as one of a few messages
with fields of known types, of a bounded size, and is never unpickled; what cannot be read so is a WireError, and the
process that sent it is ended.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel

from agentlightning.errors import AgentError, Failure
from agentlightning.rollouts import AttemptedRollout
from agentlightning.runner.agents.spec import AgentSpec, Pickled, Reference
from agentlightning.span import Span

MAX_BYTES = 256 * 1024 * 1024
"""Of one message."""


class WireError(AgentError):
    """Bytes that are no message, or a message that cannot be sent."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Whatever is sent."""


# -- runner to zygote ------------------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """The first message: what to import, and how to run it."""

    agent: AgentSpec
    reward: Reference | Pickled | None
    sys_path: tuple[str, ...]
    slots: int
    """Attempts one host runs at once."""
    fields: dict[str, str]
    """Environment variable -> the field of a dict task it holds."""
    hidden: tuple[str, ...]
    """Fields of a dict task that only the reward function is given."""
    grace: float
    variables: dict[str, str] = {}
    """What the environment holds besides while the agent is imported."""


class Fork(Message, frozen=True):
    """Make a host. Its end of a socket pair travels with the message."""

    host_id: int


class Kill(Message, frozen=True):
    """SIGKILL for a host."""

    host_id: int


# -- zygote to runner ------------------------------------------------------------------------------------------------


class Loaded(Message, frozen=True):
    """The agent is imported; forks may be asked for."""


class LoadFailed(Message, frozen=True):
    """The agent cannot be had."""

    message: str


class Exited(Message, frozen=True):
    """A host has ended."""

    host_id: int
    status: int
    """A return code as `subprocess` has it: negative for a signal."""
    traceback: str
    """What `faulthandler` wrote, if it was a fault."""


# -- runner to host --------------------------------------------------------------------------------------------------


class Job(Message, frozen=True):
    """Run one attempt."""

    job_id: int
    rollout: AttemptedRollout
    resources: dict[str, dict[str, Any]]
    """By name, as JSON has them."""
    server_url: str
    environment: dict[str, str]


class Cancel(Message, frozen=True):
    """Stop one attempt; nobody waits for its result, only for its end."""

    job_id: int


# -- host to runner --------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The host takes jobs."""

    pid: int


class Started(Message, frozen=True):
    """The host has begun an attempt. One it never began is not hurt by the host's end."""

    job_id: int


class Spans(Message, frozen=True):
    """What an attempt has emitted."""

    job_id: int
    spans: tuple[Span, ...]


class Stopping(Message, frozen=True):
    """The host has heard that an attempt is to stop: its event loop is alive."""

    job_id: int


class Done(Message, frozen=True):
    """An attempt has ended; all its spans were sent before."""

    job_id: int
    failure: Failure | None = None
    output: Any = None
    """What the agent returned, as a JSON value, shortened; None where that was its reward."""


ToZygote = Fork | Kill
FromZygote = Loaded | LoadFailed | Exited
ToHost = Job | Cancel
FromHost = Ready | Started | Spans | Stopping | Done

# -- framing ---------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("!Q")
Kind = TypeVar("Kind")


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__qualname__} cannot be sent")


def _model(kind: type[Any], value: Any) -> Any:
    return kind.model_validate(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: Message) -> bytes:
    """One message, ready to be written. Raises WireError where it holds what cannot be sent."""
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"{type(message).__name__} cannot be sent to another process: {error}") from error
    if len(body) > MAX_BYTES:
        raise WireError(f"{type(message).__name__} is {len(body)} bytes long; at most {MAX_BYTES} can be sent")
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[Kind]) -> Kind:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise WireError(f"{len(body)} bytes that are no message came: {error}") from error


class Frames(Generic[Kind]):
    """Cuts a stream of bytes into messages of one kind (a union of their types)."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Kind] = msgspec.msgpack.Decoder(kind, dec_hook=_model)
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Kind]:
        """The messages that are complete with these bytes. Raises WireError at the first that is none."""
        self._data += data
        start = 0
        while (end := self._end(start)) is not None:
            body = bytes(memoryview(self._data)[start + _LENGTH.size : end])
            start = end
            yield _decode(body, self._decoder)
        del self._data[:start]

    def _end(self, start: int) -> int | None:
        if len(self._data) - start < _LENGTH.size:
            return None
        length = _LENGTH.unpack_from(self._data, start)[0]
        if length > MAX_BYTES:
            raise WireError(f"a message of {length} bytes was announced; at most {MAX_BYTES} are read")
        end = start + _LENGTH.size + length
        return end if end <= len(self._data) else None
