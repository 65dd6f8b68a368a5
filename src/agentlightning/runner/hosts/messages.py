"""Messages between the runner, its fork server and its agent hosts: MessagePack frames with a length prefix.

Agents run in the hosts and are imported in the fork server. Data from there is therefore decoded as one of a few
message types with typed fields and a bounded size, and never unpickled; anything else is a MessageError, and the
process that sent it is killed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from agentlightning.errors import AgentError, Failure
from agentlightning.rollouts import AttemptedRollout
from agentlightning.runner.agents.agent import AgentSpec, Pickled, Reference
from agentlightning.span import Span
from agentlightning.tracing.messages import to_jsonable
from agentlightning.util.json_values import pack, unpack_large

MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of one message."""


class MessageError(AgentError):
    """Bytes that are not a valid message, or a message that cannot be encoded."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of all messages."""


class AttemptMessage(Message, frozen=True):
    """Base class of those about one attempt."""

    attempt_id: str


# -- runner to fork server -------------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """The first message: what to import and how to run it."""

    agent: AgentSpec
    reward: Reference | Pickled | None
    fields: dict[str, str]
    """Environment variable -> the field of a dict task it holds."""
    hidden: tuple[str, ...]
    """Fields of a dict task that are given to the reward function only."""
    grace: float
    """Seconds that a stopped attempt has to end."""
    slots: int = 1
    """Maximum number of concurrent attempts of one host."""
    sys_path: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    """Environment variables to set while the agent is imported."""


class Fork(Message, frozen=True):
    """Fork a host. Its end of a socket pair is passed with the message."""

    host_id: int
    alone: bool = False
    """For one attempt, which runs on the main thread."""


class Kill(Message, frozen=True):
    """Kill a host with SIGKILL."""

    host_id: int


# -- fork server to runner -------------------------------------------------------------------------------------------


class Exited(Message, frozen=True):
    """A host has exited."""

    host_id: int
    status: int
    """Return code as in `subprocess`: negative for a signal."""
    traceback: str
    """Output of `faulthandler`, if the host crashed."""


# -- runner to host --------------------------------------------------------------------------------------------------


class Job(Message, frozen=True):
    """Run one attempt."""

    rollout: AttemptedRollout
    resources: dict[str, dict[str, Any]]
    """Resources by name, as JSON values."""
    server_url: str
    environment: dict[str, str]

    @property
    def attempt_id(self) -> str:
        """By which the other messages name it."""
        return self.rollout.attempt.attempt_id


class Cancel(AttemptMessage, frozen=True):
    """Stop one attempt. Its result is ignored; its end is awaited."""


# -- host to runner --------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The host accepts jobs; the fork server has imported the agent and can fork hosts, or could not import it."""

    error: str = ""


class Program(AttemptMessage, frozen=True):
    """An attempt has started a program, or it has ended."""

    group: int
    """Its process group; 0 once it has ended."""


class Spans(AttemptMessage, frozen=True):
    """Spans that an attempt has emitted."""

    spans: tuple[Span, ...]


class Stopping(AttemptMessage, frozen=True):
    """The host acknowledges a `Cancel`: its event loop is alive."""


class Done(AttemptMessage, frozen=True):
    """An attempt has ended; all of its spans were sent before."""

    failure: Failure | None = None
    output: Any = None
    """The agent's return value as shortened JSON; None if it was the reward."""
    needs_process: str = ""
    """What the attempt touched that all attempts in its process share: its result means nothing."""


ToForkServer = Fork | Kill
FromForkServer = Ready | Exited
ToHost = Job | Cancel
FromHost = Ready | Program | Spans | Stopping | Done

# -- framing ---------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("!Q")
Kind = TypeVar("Kind")


def _decode_model(kind: type[Any], value: Any) -> Any:
    return kind.model_validate(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=to_jsonable)


def encode(message: Message) -> bytes:
    """One message as a frame. Raises MessageError if it cannot be encoded."""
    try:
        body = pack(message, _encoder)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"{type(message).__name__} cannot be sent to another process: {error}") from error
    if len(body) > MAX_BYTES:
        raise MessageError(f"{type(message).__name__} is {len(body)} bytes long; at most {MAX_BYTES} can be sent")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[Kind]):
    """Decodes a byte stream into messages of one kind (a union of message types)."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Kind] = msgspec.msgpack.Decoder(
            kind, dec_hook=_decode_model, ext_hook=unpack_large
        )
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Kind]:
        """Messages that are complete after these bytes. Raises MessageError for an invalid one."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._data)[0]
            if length > MAX_BYTES:
                raise MessageError(f"a message of {length} bytes was announced; at most {MAX_BYTES} are read")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = self._data[_LENGTH.size : end]
            del self._data[:end]
            try:
                yield self._decoder.decode(body)
            except (msgspec.DecodeError, ValueError, TypeError, RecursionError, MemoryError) as error:
                raise MessageError(f"{length} bytes received that are not a valid message: {error}") from error
