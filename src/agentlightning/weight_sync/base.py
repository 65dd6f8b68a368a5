"""Weights from the trainer's memory into a vLLM server's, without the disk: what a way of carrying them promises.

A `Courier` belongs to one server and speaks what a weight-transfer engine of vLLM (0.32, `distributed/weight_transfer`)
expects. `policy.vllm` calls it between `/start_weight_update` and `/finish_weight_update`; it never decides when
weights change, and repeats nothing: a courier that failed is joined anew before it is used again. vLLM is not imported.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from agentlightning.errors import ConfigError, PolicyError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Weights = Mapping[str, "Tensor"]
"""Name in a checkpoint -> the whole tensor."""
Tell = Callable[[dict[str, Any]], "Future[Any]"]
"""Sends the server the body of one `/update_weights`; the future ends with its answer."""
Use = Callable[[Weights], None]
Lend = Callable[[Use], Awaitable[None]]
"""Calls what it is given with the weights, in a thread where nothing changes them meanwhile."""

BUFFER_BYTES: Final = 256 << 20
"""Tensors travel together until they fill so much; a larger one travels in one piece."""
SILENCE_SECONDS: Final = 120.0
"""A server that takes nothing for so long has failed."""


class TransferError(PolicyError):
    """Weights that did not arrive."""


class Courier(Protocol):
    """The way to the workers of one server. Each method but `abort` and `invite` blocks; call it in a thread."""

    @property
    def joined(self) -> bool:
        """Whether the workers are at the other end, as far as is known."""
        ...

    def invite(self, workers: int) -> dict[str, Any]:
        """The `init_info` by which so many workers join. It may hold a secret of this transfer: not for logs."""
        ...

    def join(self) -> None:
        """Meet the workers, which have been invited at the same time. Raises TransferError."""
        ...

    def send(self, weights: Weights, tell: Tell) -> None:
        """Returns when the server has all of them. Raises TransferError, also once it is aborted."""
        ...

    def abort(self) -> None:
        """From any thread: whoever waits here stops waiting, and nobody is at the other end any more."""
        ...


@runtime_checkable
class Lender(Protocol):
    """A policy whose weights can be read where they lie."""

    @property
    def device(self) -> str:
        """`cpu`, `cuda:0` ..."""
        ...

    async def lend(self, use: Use) -> None:
        """See `Lend`. Raises what `use` raises."""
        ...


def manifest(weights: Weights) -> dict[str, Any]:
    """What a server is told of tensors before they come: names, types and shapes, in the order they travel."""
    return {
        "names": list(weights),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


def flat(tensor: Tensor) -> Tensor:
    """Its bytes in one row."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def size(tensor: Tensor) -> int:
    """In bytes."""
    return tensor.numel() * tensor.element_size()


def overflowing(tensors: Iterable[Tensor], limit: int) -> Generator[list[Tensor]]:
    """In runs that end with the tensor that makes them larger than `limit` bytes: where vLLM's NCCL engine cuts."""
    run: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        run.append(tensor)
        filled += size(tensor)
        if filled > limit:
            yield run
            run, filled = [], 0
    if run:
        yield run


class Watch:
    """Calls `abort` once `seconds` pass without `progress`, or a future it was given fails."""

    def __init__(self, abort: Callable[[], None], seconds: float) -> None:
        self._abort, self._seconds = abort, seconds
        self._timer: threading.Timer | None = None
        self.silent = False

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
        self._timer = threading.Timer(self._seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def of(self, told: Future[Any]) -> None:
        told.add_done_callback(lambda done: self._abort() if done.cancelled() or done.exception() else None)

    def _give_up(self) -> None:
        self.silent = True
        self._abort()


def answer(told: Future[Any]) -> None:
    """Wait for it. Raises TransferError in the server's own words."""
    try:
        told.result()
    except CancelledError:
        raise TransferError("the transfer was broken off") from None
    except (PolicyError, ConfigError) as error:
        raise TransferError(str(error)) from error
