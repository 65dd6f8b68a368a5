"""Weight transfer from GPU to GPU through NCCL, for vLLM's weight-transfer engine `nccl`.

Each server has a group of its own: the trainer is rank 0, the server's workers follow. They meet by a unique id that
travels in `init_info`, so neither side needs the other's torch or vLLM.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Protocol

from agentlightning.weight_sync.base import (
    BUFFER_BYTES,
    STALL_SECONDS,
    SendUpdate,
    StallTimer,
    TransferError,
    Weights,
    as_bytes,
    manifest,
    pack_over,
    wait_for_reply,
)

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS: Final = 2
"""Number of buffers that a worker receives into by turns."""


class Communicator(Protocol):
    """The trainer's membership of a group."""

    def broadcast(self, data: Tensor) -> None:
        """Returns when all ranks have the data. Raises TransferError."""
        ...

    def abort(self) -> None:
        """Stop a running broadcast. Thread-safe, and does not block."""
        ...


class CommunicatorFactory(Protocol):
    """Creates groups."""

    def unique_id(self) -> bytes: ...

    def join(self, unique_id: bytes, ranks: int) -> Communicator:
        """Returns when all ranks have joined. Raises TransferError."""
        ...


class NcclSender:
    """`WeightSender` to the workers of one server."""

    def __init__(
        self, factory: CommunicatorFactory, *, buffer_bytes: int = BUFFER_BYTES, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._factory = factory
        self._buffer_bytes = buffer_bytes
        self._stall_seconds = stall_seconds
        self._pending_group: tuple[bytes, int] | None = None
        """Unique id and number of ranks of the group that `connect` joins."""
        self._group: Communicator | None = None
        self._reply: Future[Any] | None = None
        self._wake = threading.Event()
        """Unblocks a thread that waits for workers to join."""

    @property
    def connected(self) -> bool:
        return self._group is not None

    def init_info(self, workers: int) -> dict[str, Any]:
        self.abort()
        self._wake = threading.Event()
        self._pending_group = unique_id, ranks = self._factory.unique_id(), workers + 1
        return {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": ranks,
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
            "packed_num_buffers": BUFFERS,
        }

    def connect(self) -> None:
        if self._pending_group is None:
            raise TransferError("connect() needs a new init_info()")
        (unique_id, ranks), self._pending_group = self._pending_group, None
        self._group = _join_within(lambda: self._factory.join(unique_id, ranks), self._stall_seconds, self._wake)

    def send(self, weights: Weights, send_update: SendUpdate) -> None:
        group = self._group
        if group is None:
            raise TransferError("the workers of the server are not connected")
        timer = StallTimer(self.abort, self._stall_seconds)
        self._reply = reply = send_update(manifest(weights))
        timer.watch(reply)
        try:
            with timer.running():
                self._broadcast(group, weights, timer)
                wait_for_reply(reply)
        except BaseException as error:
            replied = reply.done() and not reply.cancelled()
            self.abort()
            if timer.expired:
                raise TransferError(f"the server accepted nothing for {self._stall_seconds:g} s") from error
            if replied:
                wait_for_reply(reply)  # The server's error is the cause of the broken broadcast.
            raise
        finally:
            self._reply = None

    def _broadcast(self, group: Communicator, weights: Weights, timer: StallTimer) -> None:
        import torch

        for batch in pack_over(weights.values(), self._buffer_bytes):
            group.broadcast(torch.cat([as_bytes(tensor) for tensor in batch]))
            timer.progress()

    def abort(self) -> None:
        self._wake.set()
        group, self._group = self._group, None
        if (reply := self._reply) is not None:
            reply.cancel()
        if group is not None:
            group.abort()


def _join_within(join: Callable[[], Communicator], seconds: float, wake: threading.Event) -> Communicator:
    """The result of `join`, unless `wake` is set before. NCCL waits forever for ranks that do not come, so the joining
    thread is then left behind."""
    result: Future[Communicator] = Future()

    def run() -> None:
        try:
            group = join()
        except Exception as error:  # noqa: BLE001  The boundary of the thread: the error belongs to the waiting caller.
            result.set_exception(error)
        else:
            result.set_result(group)
            if wake.is_set():  # Nobody waits any more.
                group.abort()
        wake.set()

    threading.Thread(target=run, name="weight transfer", daemon=True).start()
    if not wake.wait(seconds):
        wake.set()  # A group that forms from now on is aborted.
        raise TransferError(f"the server's workers did not join within {seconds:g} s")
    if not result.done():
        raise TransferError("the transfer was aborted before the server's workers joined")
    return result.result()
