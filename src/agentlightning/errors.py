"""The exceptions of Agent Lightning, and `Failure`, the record of an exception.

    AgentLightningError
    ├── ConfigError            an invalid setting, flag or argument
    │   └── MissingExtraError  an optional dependency that is not installed
    ├── ExtensionError         a class of another package that raised, or returned what it may not
    ├── DatasetError           a task file that cannot be read (names the file and the line)
    ├── AgentError             an agent that cannot be loaded or run
    │   └── AgentTimeoutError  an agent that exceeded its time limit
    ├── RewardError            a reward that is missing, not finite, or of an unsupported kind
    │   └── MissingRewardError a reward function has no reward for this rollout, which is counted and left out
    ├── RewardServiceError     a service or judge that gives rewards is unreachable, or answers nonsense
    ├── RolloutRejectedError   a rollout whose data cannot be used: training skips and counts it
    ├── StoreError
    │   ├── NotFoundError      an unknown id
    │   ├── ConflictError      an illegal status change, or an id that is already in use
    │   ├── StoreFullError     the disk is full
    │   ├── StoreClosedError   the store was closed, or its database is not usable
    │   ├── StoreLostError     the database was deleted or replaced while it was open
    │   ├── StoreVersionError  the database has the schema of another version of this package
    │   └── StoreServerError   the server of a remote store is unreachable, or has an incompatible version
    │       └── StoreAuthError the server requires a token, or rejects the given one
    ├── PolicyError            a model that cannot be loaded, sampled from or trained
    │   ├── ModelNotFoundError a name of a model that stands for none, or for one that cannot be fetched
    │   ├── ContextLengthError a prompt that leaves no room for a response
    │   ├── RankError          a process of training on several has ended, or cannot take part
    │   └── UnfaithfulSampleError  samples whose probabilities a loss cannot correct for
    ├── ServerError            a server that cannot start, e.g. because the port is in use
    ├── TrainingStopped        training ended early, e.g. because of too many failures
    │   └── UnknownTokensError calls without tokens, for an algorithm that learns from tokens
    └── ResumeError            a run directory that cannot be continued

Each message names the invalid value and a remedy.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import ClassVar


class AgentLightningError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(AgentLightningError, ValueError):
    """A setting, flag or argument is invalid."""


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, *, plugin: bool = False) -> None:
        """`plugin`: it is a distribution of its own, below plugins/ in a checkout of this repository."""
        where = f"./plugins/{extra} (in a checkout of Agent Lightning)" if plugin else f"'agentlightning[{extra}]'"
        super().__init__(f"{package} is not installed; run: pip install {where}")


class ExtensionError(AgentLightningError):
    """A loss, credit rule, algorithm ... of another package raised, or returned what it may not."""


class DatasetError(AgentLightningError, ValueError):
    """A task file cannot be read."""


class AgentError(AgentLightningError):
    """An agent cannot be loaded or run."""


class AgentTimeoutError(AgentError):
    """An agent exceeded its time limit."""


class RewardError(AgentLightningError, ValueError):
    """A reward is missing, not finite, or of an unsupported kind."""

    reason: ClassVar[str] = "bad_reward"
    """Reason under which rejected rollouts are counted."""


class MissingRewardError(RewardError):
    """A reward function has no reward for this rollout. The rollout succeeds without one: it is counted, and left out
    of what needs rewards. Raise it in a reward function of your own."""

    reason: ClassVar[str] = "missing_reward"


class RewardServiceError(AgentLightningError):
    """A service or judge that gives rewards cannot be reached, or answers what is no reward. The attempt fails."""

    status: int | None = None
    """HTTP status, if it answered."""


class RolloutRejectedError(AgentLightningError, ValueError):
    """The recorded data of a rollout cannot be used. Never ends a run: the rollout is skipped, named and counted.

    `reason` is a short identifier of the kind of problem, such as "token_ids", under which rollouts are counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreError(AgentLightningError):
    """A store operation failed."""


class NotFoundError(StoreError, LookupError):
    """An id is unknown."""


class ConflictError(StoreError):
    """An illegal status change, or an id that is already in use."""


class StoreFullError(StoreError):
    """The disk is full."""


class StoreClosedError(StoreError):
    """The store was closed, or its database is unusable."""


class StoreLostError(StoreError):
    """The database files were deleted or replaced while open; further writes would be lost."""


class StoreVersionError(StoreError):
    """The database has the schema of another version of this package, perhaps since it was opened."""


class StoreServerError(StoreError):
    """The server of a remote store is unreachable, or has an incompatible version."""


class StoreAuthError(StoreServerError):
    """The server requires a token, or rejects the given one."""


class PolicyError(AgentLightningError):
    """A model cannot be loaded, sampled from or trained."""


class ModelNotFoundError(PolicyError, ConfigError):
    """The name of a model stands for none, or for one that cannot be fetched."""


class ContextLengthError(PolicyError, ValueError):
    """A prompt leaves no room for a response."""


class RankError(PolicyError):
    """A process of training on several has ended, or cannot take part."""


class UnfaithfulSampleError(PolicyError, ValueError):
    """Samples whose sampling probabilities a loss cannot correct for."""

    reason: ClassVar[str] = "unfaithful_sampling"
    """Reason under which rejected rollouts are counted."""


class ServerError(AgentLightningError):
    """A server cannot start."""


class TrainingStopped(AgentLightningError):
    """Training ended early."""


class UnknownTokensError(TrainingStopped):
    """Calls without recorded tokens, for an algorithm that needs them."""


class ResumeError(AgentLightningError):
    """A run directory cannot be resumed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The record of an exception."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        found = traceback.TracebackException.from_exception(error)  # whose text is one where `str(error)` raises, too
        return cls(type(error).__qualname__, _valid_utf8(str(found)), _valid_utf8("".join(found.format())))


def _valid_utf8(text: str) -> str:
    """The text with unpaired surrogates escaped, so that it can be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
