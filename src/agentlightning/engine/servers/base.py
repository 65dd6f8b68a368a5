"""The contract of one model server: what a pool of servers asks of each.

A `ModelServer` speaks one server's own API (`vllm`, `sglang`). The pool decides which server samples, what is retried,
and which weights each server gets; a `ModelServer` never retries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from agentlightning.engine.base import FinishReason, SamplingParams, TopLogprobs
from agentlightning.errors import AgentLightningError, ConfigError, ContextLengthError, PolicyError
from agentlightning.transport.base import CONTEXT_ERROR
from agentlightning.weight_sync.transfer import LendWeights, WeightSender


class ModelServerError(PolicyError):
    """A server that gave no answer, or only a part of it."""

    def __init__(self, message: str, *, retryable: bool, status: int | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        """Whether another server may succeed."""
        self.status = status
        """HTTP status, if the server answered."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One answer to sample."""

    model: str
    """The name of the model, or of an adapter, on the server."""
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    """Each ends the answer, and is part of it."""
    adapter: bool = False
    """Whether `model` is an adapter."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of an answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an answer."""

    finish_reason: FinishReason
    weights: tuple[tuple[str, int], ...] = ()
    """(label of the weights, number of tokens they sampled), in order; empty if the server does not report it."""


PROBE_PROMPT: Final = (1, 2, 3)
"""A prompt that every vocabulary contains."""

OnChunk = Callable[[TokenChunk], None]


@dataclass(frozen=True, slots=True)
class ServedModelInfo:
    """What a server reports about the model it serves."""

    model: str
    context_length: int
    adapters: frozenset[str] = field(default_factory=frozenset[str])


class ModelServer(Protocol):
    """One server. Every method raises ModelServerError."""

    supported_params: frozenset[str]
    """See `Engine.supported_params`."""

    @property
    def url(self) -> str: ...

    async def model_info(self) -> ServedModelInfo:
        """The served model. Raises ConfigError if the server has none of the requested name."""
        ...

    async def verify(self, *, weights_change: bool) -> None:
        """Raises ConfigError if the server was started in a way that gives wrong log-probabilities or, with
        `weights_change`, that does not let its weights be replaced."""
        ...

    async def health(self) -> None:
        """Returns if the server can sample."""
        ...

    async def kv_cache_usage(self) -> float | None:
        """The share of its memory for keys and values that is in use; None if it does not report it."""
        ...

    async def sample(self, request: SampleRequest, on_chunk: OnChunk, *, stream: bool) -> Completion:
        """Sample one answer. `on_chunk` gets all of its tokens; with `stream`, as they are sampled. Cancelling the call
        ends the request on the server. Raises ContextLengthError if the prompt leaves no room."""
        ...

    async def weight_label(self) -> str | None:
        """The label of the server's weights; None if it keeps none."""
        ...

    async def load_weights(self, directory: Path, label: str, on_loaded: Callable[[], None]) -> None:
        """Replace the weights in place by those in `directory`. Running answers wait, then continue with the new
        weights; everything cached with the old ones is dropped. `on_loaded` is called right before they continue."""
        ...

    async def load_adapter(self, name: str, directory: Path) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...


class WeightReceiver(ModelServer, Protocol):
    """A server that also accepts weights without the disk."""

    async def connect(self, sender: WeightSender) -> None:
        """Connect the server's workers with `sender`. Raises ConfigError if it was not started for that."""
        ...

    async def receive_weights(
        self, sender: WeightSender, lend: LendWeights, label: str, on_loaded: Callable[[], None]
    ) -> None:
        """As `load_weights`, with weights lent by `lend` and sent by `sender`. After a failure the server may hold a
        mix of old and new weights until `load_weights` or `receive_weights` succeeds."""
        ...

    async def discard_partial_update(self) -> None:
        """Drop what arrived of an interrupted transfer. Returns once the server no longer waits for the rest."""
        ...


def caller_error(error: ModelServerError, request: SampleRequest) -> AgentLightningError:
    """The error to raise for a failed `request`: rejections of the request itself become ContextLengthError or
    ConfigError."""
    if error.status not in (400, 422):
        return error
    if CONTEXT_ERROR.search(str(error)):
        return ContextLengthError(
            f"the prompt has {len(request.prompt)} tokens, which leaves no room for an answer; shorten the prompt, or "
            f"use a model with a longer context ({error})"
        )
    return ConfigError(f"the model server cannot sample with these parameters: {error}")
