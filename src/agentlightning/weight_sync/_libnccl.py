"""Binding to the C interface of NCCL, the library that torch ships.

torch's own interface does not fit: `ProcessGroupNCCL` exchanges the unique id through a store of its own instead of
taking the one that vLLM's workers wait for, and a failed collective can end the process; `torch.cuda.nccl` broadcasts
between the devices of one process only, and offers no abort for a broadcast whose receiver is gone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import ConfigError
from agentlightning.weight_sync.base import TransferError

if TYPE_CHECKING:
    from torch import Tensor

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
        if not self._aborted.is_set():
            self._aborted.set()
            # It may wait for running kernels, and nobody should wait for it.
            threading.Thread(target=self._nccl.abort, args=(self._pointer,), daemon=True).start()
