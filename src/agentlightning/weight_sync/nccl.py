"""Weight transfer from GPU to GPU through NCCL, for vLLM's weight-transfer engine `nccl`.

Each server has a group of its own: the trainer is rank 0, the server's workers follow. They meet by a unique id that
travels in `init_info`, so neither side needs the other's torch or vLLM.
"""

from __future__ import annotations

import base64
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import ConfigError
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


# --  libnccl --------------------------------------------------------------------------------------------------------

# Binding to the C interface of NCCL, the library that torch ships.
#
# torch's own interface does not fit: `ProcessGroupNCCL` exchanges the unique id through a store of its own instead of
# taking the one that vLLM's workers wait for, and a failed collective can end the process; `torch.cuda.nccl` broadcasts
# between the devices of one process only, and offers no abort for a broadcast whose receiver is gone.

UNIQUE_ID_BYTES: Final = 128
UINT8, FLOAT32, SUM = 1, 7, 0
"""ncclDataType_t and ncclRedOp_t (nccl.h)."""


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class NcclLibrary:
    """`libnccl.so.2`. Create it with `NcclLibrary.open`."""

    def __init__(self, library: ctypes.CDLL, device: str) -> None:
        self._library = library
        self.device = device
        pointer, size_t, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, UniqueId, number]
        library.ncclBroadcast.argtypes = [pointer, pointer, size_t, number, number, pointer, pointer]
        library.ncclAllReduce.argtypes = [pointer, pointer, size_t, number, number, pointer, pointer]
        library.ncclCommAbort.argtypes = [pointer]

    @classmethod
    def open(cls, device: str) -> NcclLibrary:
        """For a trainer on `device`. Raises ConfigError if that is not a GPU, or NCCL is missing."""
        import torch  # It ships NCCL, and has loaded it if it was built for CUDA.

        if not device.startswith("cuda") or not torch.cuda.is_available():
            raise ConfigError(f'transfer="nccl" needs the trainer on a GPU, and it is on {device}; use "disk"')
        name = os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2"
        try:
            return cls(ctypes.CDLL(name), device)
        except OSError as error:
            raise ConfigError(f'transfer="nccl" needs NCCL: {error}; install torch for CUDA, or use "disk"') from error

    def unique_id(self) -> bytes:
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def join(self, unique_id: bytes, ranks: int) -> NcclCommunicator:
        """Returns when all ranks have joined. Raises TransferError."""
        import torch

        pointer = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            self.call("ncclCommInitRank", ctypes.byref(pointer), ranks, UniqueId.from_buffer_copy(unique_id), 0)
            communicator = NcclCommunicator(self, pointer)
            communicator.warm_up()
        return communicator

    def abort(self, pointer: ctypes.c_void_p) -> None:
        """End whatever runs in the group, ignoring the outcome."""
        self._library.ncclCommAbort(pointer)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises TransferError with NCCL's message."""
        result = int(getattr(self._library, name)(*arguments))
        if result != 0:
            message = bytes(self._library.ncclGetErrorString(result)).decode()
            raise TransferError(f"{name}: {message}")


class NcclCommunicator:
    """Rank 0 of a group."""

    def __init__(self, nccl: NcclLibrary, pointer: ctypes.c_void_p) -> None:
        self._nccl = nccl
        self._pointer = pointer
        self._aborted = threading.Event()

    def warm_up(self) -> None:
        """Take part in the all-reduce of one number with which vLLM's workers begin."""
        import torch

        number = torch.zeros(1, device=self._nccl.device)
        stream = torch.cuda.current_stream()
        address = number.data_ptr()
        self._nccl.call("ncclAllReduce", address, address, 1, FLOAT32, SUM, self._pointer, stream.cuda_stream)
        stream.synchronize()

    def broadcast(self, data: Tensor) -> None:
        """Returns when all ranks have the data. Raises TransferError."""
        import torch

        if self._aborted.is_set():
            raise TransferError("the broadcast was aborted")
        with torch.cuda.device(self._nccl.device):
            stream, address = torch.cuda.current_stream(), data.data_ptr()
            self._nccl.call(
                "ncclBroadcast", address, address, data.numel(), UINT8, 0, self._pointer, stream.cuda_stream
            )
            stream.synchronize()
        if self._aborted.is_set():
            raise TransferError("the broadcast was aborted")

    def abort(self) -> None:
        """Stop a running broadcast. Thread-safe, and does not block."""
        if not self._aborted.is_set():
            self._aborted.set()
            # It may wait for running kernels, and nobody should wait for it.
            threading.Thread(target=self._nccl.abort, args=(self._pointer,), daemon=True).start()


BUFFERS: Final = 2
"""Number of buffers that a worker receives into by turns."""


class NcclSender:
    """`WeightSender` to the workers of one server."""

    def __init__(
        self, factory: NcclLibrary, *, buffer_bytes: int = BUFFER_BYTES, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._factory = factory
        self._buffer_bytes = buffer_bytes
        self._stall_seconds = stall_seconds
        self._pending_group: tuple[bytes, int] | None = None
        """Unique id and number of ranks of the group that `connect` joins."""
        self._group: NcclCommunicator | None = None
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

    def _broadcast(self, group: NcclCommunicator, weights: Weights, timer: StallTimer) -> None:
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


def _join_within(join: Callable[[], NcclCommunicator], seconds: float, wake: threading.Event) -> NcclCommunicator:
    """The result of `join`, unless `wake` is set before. NCCL waits forever for ranks that do not come, so the joining
    thread is then left behind."""
    result: Future[NcclCommunicator] = Future()

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
