"""The contract of a weight transfer from the trainer's memory into a vLLM server's memory, without the disk.

A `WeightSender` belongs to one server and speaks the protocol of one of vLLM's weight-transfer engines (0.32,
`distributed/weight_transfer`). The vLLM client calls it between `/start_weight_update` and `/finish_weight_update`. It
never decides when weights change, and never retries: after a failure it must connect again. vLLM is not imported.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Final, Protocol

from agentlightning.errors import ConfigError, PolicyError

if TYPE_CHECKING:
    from torch import Tensor

Weights = Mapping[str, "Tensor"]
"""Name in a checkpoint -> the whole tensor."""
SendUpdate = Callable[[dict[str, Any]], "Future[Any]"]
"""Posts the body of one `/update_weights` to the server; the future resolves with its reply."""
UseWeights = Callable[[Weights], None]
LendWeights = Callable[[UseWeights], Awaitable[None]]
"""Calls its argument with the weights, in a thread where nothing changes them meanwhile."""

BUFFER_BYTES: Final = 256 << 20
"""Tensors are packed into buffers of this size; a larger tensor travels in one piece."""
STALL_SECONDS: Final = 120.0
"""A server that accepts nothing for this long has failed."""


class TransferError(PolicyError):
    """A transfer of weights that did not complete."""


class WeightSender(Protocol):
    """The connection to the workers of one server. Every method but `abort` and `init_info` blocks; call it in a
    thread."""

    @property
    def connected(self) -> bool:
        """Whether the workers are at the other end, as far as is known."""
        ...

    def init_info(self, workers: int) -> dict[str, Any]:
        """The `init_info` with which this number of workers connects. It may contain a secret: never log it."""
        ...

    def connect(self) -> None:
        """Meet the workers, which receive `init_info` at the same time. Raises TransferError."""
        ...

    def send(self, weights: Weights, send_update: SendUpdate) -> None:
        """Returns when the server has all weights. Raises TransferError, also when aborted."""
        ...

    def abort(self) -> None:
        """Disconnect, and unblock a thread that is connecting or sending. Thread-safe."""
        ...


class WeightOwner(Protocol):
    """A policy whose weights can be read in place (`Capabilities.lends_weights`)."""

    @property
    def device(self) -> str:
        """`cpu`, `cuda:0` ..."""
        ...

    async def lend(self, use: UseWeights) -> None:
        """See `LendWeights`. Raises what `use` raises."""
        ...


def manifest(weights: Weights) -> dict[str, Any]:
    """Names, dtypes and shapes of tensors in the order they are sent, as the server expects them."""
    return {
        "names": list(weights),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes as a flat uint8 tensor."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def pack_over(tensors: Iterable[Tensor], limit: int) -> Generator[list[Tensor]]:
    """Batches that each end with the tensor that exceeds `limit` bytes: where vLLM's NCCL engine cuts."""
    batch: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        batch.append(tensor)
        filled += num_bytes(tensor)
        if filled > limit:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


class StallTimer:
    """Calls `abort` when `seconds` pass without `progress`, or when a watched future fails."""

    def __init__(self, abort: Callable[[], None], seconds: float) -> None:
        self._abort, self._seconds = abort, seconds
        self._timer: threading.Timer | None = None
        self.expired = False

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        self.progress()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def progress(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def watch(self, reply: Future[Any]) -> None:
        reply.add_done_callback(lambda done: self._abort() if done.cancelled() or done.exception() else None)

    def _expire(self) -> None:
        self.expired = True
        self._abort()


def wait_for_reply(reply: Future[Any]) -> None:
    """Block until the server has replied. Raises TransferError with the server's own message."""
    try:
        reply.result()
    except CancelledError:
        raise TransferError("the transfer was aborted") from None
    except (PolicyError, ConfigError) as error:
        raise TransferError(str(error)) from error
