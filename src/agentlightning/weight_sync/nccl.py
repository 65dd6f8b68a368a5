"""Weights from GPU to GPU through NCCL, as vLLM's weight-transfer engine `nccl` receives them.

Each server has a group of its own: the trainer is rank 0, the server's workers follow. They meet by a unique id that
travels in `init_info`, so neither side needs the other's torch or vLLM. NCCL is called through its C interface, because
torch's offers no way to abort a broadcast whose receiver is gone.
"""

from __future__ import annotations

import base64
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Protocol

from agentlightning.errors import ConfigError
from agentlightning.weight_sync.base import (
    BUFFER_BYTES,
    SILENCE_SECONDS,
    Tell,
    TransferError,
    Watch,
    Weights,
    answer,
    flat,
    manifest,
    overflowing,
)

if TYPE_CHECKING:
    from torch import Tensor

UNIQUE_ID_BYTES: Final = 128
UINT8, FLOAT32, SUM = 1, 7, 0
"""ncclDataType_t and ncclRedOp_t (nccl.h)."""
BUFFERS: Final = 2
"""How many buffers a worker receives into by turns."""


class Communicator(Protocol):
    """The trainer's place in a group."""

    def broadcast(self, data: Tensor) -> None:
        """Returns when all have it. Raises TransferError."""
        ...

    def abort(self) -> None:
        """From any thread, without waiting: whoever broadcasts stops."""
        ...


class Library(Protocol):
    """What opens groups."""

    def unique_id(self) -> bytes: ...

    def join(self, unique_id: bytes, ranks: int) -> Communicator:
        """Returns when all ranks are there. Raises TransferError."""
        ...


class NcclCourier:
    """To the workers of one server. See `transfer.base.Courier`."""

    def __init__(
        self, library: Library, *, buffer_bytes: int = BUFFER_BYTES, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._library = library
        self._buffer_bytes = buffer_bytes
        self._silence = silence_seconds
        self._invited: tuple[bytes, int] | None = None
        self._group: Communicator | None = None
        self._told: Future[Any] | None = None
        self._woken = threading.Event()
        """Set: whoever waits for workers to join stops waiting."""

    @property
    def joined(self) -> bool:
        return self._group is not None

    def invite(self, workers: int) -> dict[str, Any]:
        self.abort()
        self._woken = threading.Event()
        self._invited = unique_id, ranks = self._library.unique_id(), workers + 1
        return {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": ranks,
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
            "packed_num_buffers": BUFFERS,
        }

    def join(self) -> None:
        if self._invited is None:
            raise TransferError("nobody was invited to the transfer")
        (unique_id, ranks), self._invited = self._invited, None
        self._group = _within(lambda: self._library.join(unique_id, ranks), self._silence, self._woken)

    def send(self, weights: Weights, tell: Tell) -> None:
        group = self._group
        if group is None:
            raise TransferError("the workers of the server are not joined")
        watch = Watch(self.abort, self._silence)
        self._told = told = tell(manifest(weights))
        watch.of(told)
        try:
            with watch.running():
                self._broadcast(group, weights, watch)
                answer(told)
        except BaseException as error:
            refused = told.done() and not told.cancelled()
            self.abort()
            if watch.silent:
                raise TransferError(f"the server took nothing for {self._silence:g} s") from error
            if refused:
                answer(told)  # What the server says is the cause; that the broadcast broke off, the effect.
            raise
        finally:
            self._told = None

    def _broadcast(self, group: Communicator, weights: Weights, watch: Watch) -> None:
        import torch

        for run in overflowing(weights.values(), self._buffer_bytes):
            group.broadcast(torch.cat([flat(tensor) for tensor in run]))
            watch.progress()

    def abort(self) -> None:
        self._woken.set()
        group, self._group = self._group, None
        if (told := self._told) is not None:
            told.cancel()
        if group is not None:
            group.abort()


def _within(work: Callable[[], Communicator], seconds: float, woken: threading.Event) -> Communicator:
    """What `work` returns, unless somebody sets `woken` before. NCCL waits for ever for ranks that do not come: the
    thread that waits is then left behind."""
    done: Future[Communicator] = Future()

    def run() -> None:
        try:
            group = work()
        except Exception as error:  # noqa: BLE001  The boundary of the thread: the error belongs to who waits.
            done.set_exception(error)
        else:
            done.set_result(group)
            if woken.is_set():  # Nobody waits any more.
                group.abort()
        woken.set()

    threading.Thread(target=run, name="weight transfer", daemon=True).start()
    if not woken.wait(seconds):
        woken.set()  # Whoever comes now comes too late.
        raise TransferError(f"the server's workers did not join within {seconds:g} s")
    if not done.done():
        raise TransferError("the transfer was called off before the server's workers joined")
    return done.result()


# -- NCCL's own interface --------------------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class Nccl:
    """`libnccl.so.2`, the one torch brings. Make it with `Nccl.open`."""

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
    def open(cls, device: str) -> Nccl:
        """For a trainer on `device`. Raises ConfigError where that is no GPU, or there is no NCCL."""
        import torch  # It brings NCCL, and has loaded it where it was built with it.

        if not device.startswith("cuda") or not torch.cuda.is_available():
            raise ConfigError(f'transfer="nccl" needs the trainer on a GPU, and it is on {device}; use "disk"')
        name = os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2"
        try:
            return cls(ctypes.CDLL(name), device)
        except OSError as error:
            raise ConfigError(f'transfer="nccl" needs NCCL: {error}; install torch for CUDA, or use "disk"') from error

    def unique_id(self) -> bytes:
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, ranks: int) -> Communicator:
        import torch

        pointer = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            self.call("ncclCommInitRank", ctypes.byref(pointer), ranks, UniqueId.from_buffer_copy(unique_id), 0)
            group = NcclCommunicator(self, pointer)
            group.warm_up()
        return group

    def abort(self, pointer: ctypes.c_void_p) -> None:
        """Whatever runs in the group ends; how it went nobody needs to know."""
        self._library.ncclCommAbort(pointer)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises TransferError in NCCL's words."""
        result = int(getattr(self._library, name)(*arguments))
        if result != 0:
            words = bytes(self._library.ncclGetErrorString(result)).decode()
            raise TransferError(f"{name}: {words}")


class NcclCommunicator:
    """Rank 0 of a group."""

    def __init__(self, nccl: Nccl, pointer: ctypes.c_void_p) -> None:
        self._nccl = nccl
        self._pointer = pointer
        self._aborted = threading.Event()

    def warm_up(self) -> None:
        """vLLM's workers sum up one number as soon as they are there, and wait for ours."""
        import torch

        number = torch.zeros(1, device=self._nccl.device)
        stream = torch.cuda.current_stream()
        where = number.data_ptr()
        self._nccl.call("ncclAllReduce", where, where, 1, FLOAT32, SUM, self._pointer, stream.cuda_stream)
        stream.synchronize()

    def broadcast(self, data: Tensor) -> None:
        import torch

        if self._aborted.is_set():
            raise TransferError("the broadcast was broken off")
        with torch.cuda.device(self._nccl.device):
            stream, where = torch.cuda.current_stream(), data.data_ptr()
            self._nccl.call("ncclBroadcast", where, where, data.numel(), UINT8, 0, self._pointer, stream.cuda_stream)
            stream.synchronize()
        if self._aborted.is_set():
            raise TransferError("the broadcast was broken off")

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            # It may wait for kernels that are running, and nobody should wait for it.
            threading.Thread(target=self._nccl.abort, args=(self._pointer,), daemon=True).start()
