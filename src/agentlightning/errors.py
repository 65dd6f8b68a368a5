"""Every error Agent Lightning raises on purpose, and the one place where a failure becomes a record.

    AgentLightningError
    ├── ConfigError            a setting, flag or argument that cannot work
    │   └── MissingExtraError  an optional dependency that is not installed
    ├── DatasetError           a task file that cannot be read (names the file and the line)
    ├── AgentError             an agent that cannot be loaded or run
    │   └── AgentTimeoutError  an agent that did not end within its time
    ├── RewardError            a reward that is missing, not a finite number, or of a kind nobody can use
    ├── RolloutRejectedError   one rollout whose data cannot be used: training leaves it out and counts it
    ├── StoreError
    │   ├── NotFoundError      an id the store does not know
    │   ├── ConflictError      an illegal status change, or an id that is already taken by something else
    │   ├── StoreFullError     the disk refused a write
    │   ├── StoreClosedError   the store was closed, or its database is not usable
    │   ├── StoreLostError     the database was deleted or replaced while it was open
    │   └── StoreServerError   the server of a remote store cannot be reached, or is another version
    │       └── StoreAuthError it wants a token, or another one
    ├── PolicyError            a model that cannot be loaded, sampled from or trained
    │   ├── ContextLengthError a prompt that leaves no room for an answer
    │   └── UnfaithfulSampleError  samples whose probabilities a loss cannot correct for
    ├── ServerError            a server that cannot start (a port in use, say)
    ├── TrainingStopped        training that ended itself for the user's sake (too many failures)
    │   └── UnknownTokensError calls without tokens, for an algorithm that learns from tokens
    └── ResumeError            a run directory that cannot be continued

Each message names the value and the way out.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import ClassVar


class AgentLightningError(Exception):
    """The root of all errors raised on purpose."""


class ConfigError(AgentLightningError, ValueError):
    """A setting that cannot work."""


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is missing."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'agentlightning[{extra}]'")


class DatasetError(AgentLightningError, ValueError):
    """A task file that cannot be read."""


class AgentError(AgentLightningError):
    """An agent that cannot be loaded or run."""


class AgentTimeoutError(AgentError):
    """An agent that did not end within its time."""


class RewardError(AgentLightningError, ValueError):
    """A reward that is missing, not finite, or of a kind that cannot be used."""

    reason: ClassVar[str] = "bad_reward"
    """What a rollout is counted under that is left out because of it."""


class RolloutRejectedError(AgentLightningError, ValueError):
    """One rollout whose recorded data cannot be used. It never ends a run: the rollout is left out, named and counted.

    `reason` is what it is counted under: a short identifier such as "token_ids", the same for all rollouts of the kind.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreError(AgentLightningError):
    """The store cannot do what was asked."""


class NotFoundError(StoreError, LookupError):
    """An id the store does not know."""


class ConflictError(StoreError):
    """An illegal status change, or an id that is taken."""


class StoreFullError(StoreError):
    """The disk refused a write."""


class StoreClosedError(StoreError):
    """The store was closed, or its database is not usable."""


class StoreLostError(StoreError):
    """The files of the database were deleted or replaced while it was open: what is written to them is lost."""


class StoreServerError(StoreError):
    """The server of a remote store cannot be reached, or does not speak our version."""


class StoreAuthError(StoreServerError):
    """The server wants a token, or another one."""


class PolicyError(AgentLightningError):
    """A model that cannot be loaded, sampled from or trained."""


class ContextLengthError(PolicyError, ValueError):
    """A prompt that leaves no room for an answer."""


class UnfaithfulSampleError(PolicyError, ValueError):
    """Samples whose probabilities a loss cannot correct for."""

    reason: ClassVar[str] = "unfaithful_sampling"
    """What a rollout is counted under that is left out because of it."""


class ServerError(AgentLightningError):
    """A server that cannot start."""


class TrainingStopped(AgentLightningError):
    """Training ended itself."""


class UnknownTokensError(TrainingStopped):
    """Calls whose tokens nobody knows, for an algorithm that learns from tokens."""


class ResumeError(AgentLightningError):
    """A run directory that cannot be continued."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What is kept of an exception once it has become a record."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(type=type(error).__qualname__, message=_kept(_message(error)), traceback=_kept(text))


def _kept(text: str) -> str:
    """As UTF-8 can carry it: half a surrogate pair is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001  an error whose text cannot be had must still become a record
        return f"<its str() raised {type(failed).__name__}>"
