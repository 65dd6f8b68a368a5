"""Transfers of weights from the trainer's memory into a vLLM server's memory, without the disk.

A `WeightSender` belongs to one server and speaks the protocol of one of vLLM's weight-transfer engines (0.32,
`distributed/weight_transfer`): `NcclSender` from GPU to GPU, `CudaIpcSender` on one GPU that both share. The client of
vLLM calls it between `/start_weight_update` and `/finish_weight_update`. It never decides when weights change, and
never retries: after a failure it must connect again. `select_transport` chooses one by configuration and devices. vLLM
is not imported.
"""

from __future__ import annotations

import base64
import ctypes
import os
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Protocol

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

BUFFER_BYTES = 256 << 20
"""Tensors are packed into buffers of this size; a larger tensor travels in one piece."""
STALL_SECONDS = 120.0
"""A server that accepts nothing for this long has failed."""


class TransferError(PolicyError):
    """A transfer of weights that did not complete."""


class WeightOwner(Protocol):
    """A policy whose weights can be read in place (`Capabilities.lends_weights`)."""

    @property
    def device(self) -> str:
        """`cpu`, `cuda:0` ..."""
        ...

    async def lend(self, use: UseWeights) -> None:
        """See `LendWeights`. Raises what `use` raises."""
        ...


# -- sender ----------------------------------------------------------------------------------------------------------


class WeightSender(ABC):
    """The connection to the workers of one server. `connect` and `send` block; call them in a thread."""

    def __init__(self, gpu: Any, *, buffer_bytes: int = BUFFER_BYTES, stall_seconds: float = STALL_SECONDS) -> None:
        """`gpu`: what a kind of sender reaches the trainer's GPU by."""
        self.connected = False
        """Whether the workers are at the other end, as far as is known."""
        self._gpu = gpu
        self._buffer_bytes = buffer_bytes
        self._stall_seconds = stall_seconds
        self._reply: Future[Any] | None = None
        """That of the server to the update in progress."""
        self._timer: threading.Timer | None = None
        self._stalled = False

    @abstractmethod
    def init_info(self, workers: int) -> dict[str, Any]:
        """The `init_info` with which this number of workers connects. It may contain a secret: never log it."""

    @abstractmethod
    def connect(self) -> None:
        """Meet the workers, which receive `init_info` at the same time. Raises TransferError."""

    @abstractmethod
    def _transfer(self, weights: Weights, send_update: SendUpdate) -> None:
        """Returns when the server has all weights. Calls `_post` for each update, and `_progress` as it goes on."""

    def send(self, weights: Weights, send_update: SendUpdate) -> None:
        """Returns when the server has all weights. Raises TransferError, also when aborted."""
        self._stalled = False
        self._progress()
        try:
            self._transfer(weights, send_update)
        except BaseException as error:
            reply = self._reply
            self.abort()
            if self._stalled:
                raise TransferError(f"the server accepted nothing for {self._stall_seconds:g} s") from error
            if reply is not None and reply.done() and not reply.cancelled():
                wait_for_reply(reply)  # The server's error is the cause of the broken transfer.
            raise
        finally:
            self._reply = None
            if self._timer is not None:
                self._timer.cancel()

    def abort(self) -> None:
        """Disconnect, and unblock a thread that is connecting or sending. Thread-safe."""
        self.connected = False
        if (reply := self._reply) is not None:
            reply.cancel()

    def _post(self, send_update: SendUpdate, update: dict[str, Any]) -> Future[Any]:
        """Post an update. A server that refuses it ends the transfer."""
        self._reply = reply = send_update(update)
        reply.add_done_callback(lambda done: self.abort() if done.cancelled() or done.exception() else None)
        return reply

    def _progress(self) -> None:
        """The server has accepted something: the time after which it has stalled begins again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._stall_seconds, self._stall)
        self._timer.daemon = True
        self._timer.start()

    def _stall(self) -> None:
        self._stalled = True
        self.abort()


def wait_for_reply(reply: Future[Any]) -> None:
    """Block until the server has replied. Raises TransferError with the server's own message."""
    try:
        reply.result()
    except CancelledError:
        raise TransferError("the transfer was aborted") from None
    except (PolicyError, ConfigError) as error:
        raise TransferError(str(error)) from error


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


# -- nccl ------------------------------------------------------------------------------------------------------------

# Binding to the C interface of NCCL, the library that torch ships.
#
# torch's own interface does not fit: `ProcessGroupNCCL` exchanges the unique id through a store of its own instead of
# taking the one that vLLM's workers wait for, and a failed collective can end the process; `torch.cuda.nccl` broadcasts
# between the devices of one process only, and offers no abort for a broadcast whose receiver is gone.

UNIQUE_ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0
"""ncclDataType_t and ncclRedOp_t (nccl.h)."""
BUFFERS = 2
"""Number of buffers that a worker receives into by turns."""


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
        _require_gpu("nccl", device)  # torch ships NCCL, and has loaded it if it was built for CUDA.
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

        self._check_not_aborted()
        with torch.cuda.device(self._nccl.device):
            stream, address = torch.cuda.current_stream(), data.data_ptr()
            self._nccl.call(
                "ncclBroadcast", address, address, data.numel(), UINT8, 0, self._pointer, stream.cuda_stream
            )
            stream.synchronize()
        self._check_not_aborted()

    def abort(self) -> None:
        """Stop a running broadcast. Thread-safe, and does not block."""
        if not self._aborted.is_set():
            self._aborted.set()
            # It may wait for running kernels, and nobody should wait for it.
            threading.Thread(target=self._nccl.abort, args=(self._pointer,), daemon=True).start()

    def _check_not_aborted(self) -> None:
        if self._aborted.is_set():
            raise TransferError("the broadcast was aborted")


class NcclSender(WeightSender):
    """`WeightSender` to the workers of one server on other GPUs.

    Each server has a group of its own: the trainer is rank 0, the server's workers follow. They meet by a unique id
    that travels in `init_info`, so neither side needs the other's torch or vLLM."""

    _gpu: NcclLibrary
    _meeting: tuple[bytes, int] | None = None
    """Unique id and number of ranks of the group that `connect` joins."""
    _joined: Future[NcclCommunicator] | None = None
    """The group, once all have met; cancelled where nobody waits for it any more."""

    def init_info(self, workers: int) -> dict[str, Any]:
        self.abort()
        self._joined = Future()
        self._meeting = unique_id, ranks = self._gpu.unique_id(), workers + 1
        return {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": ranks,
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
            "packed_num_buffers": BUFFERS,
        }

    def connect(self) -> None:
        """See `WeightSender.connect`. NCCL waits forever for ranks that do not come: the joining thread is then left
        behind."""
        if self._meeting is None or self._joined is None:
            raise TransferError("connect() needs a new init_info()")
        meeting, self._meeting, joined = self._meeting, None, self._joined
        threading.Thread(target=self._join, args=(joined, *meeting), name="weight transfer", daemon=True).start()
        try:
            joined.result(self._stall_seconds)
        except TimeoutError:
            self.abort()
            raise TransferError(f"the server's workers did not join within {self._stall_seconds:g} s") from None
        except CancelledError:
            raise TransferError("the transfer was aborted before the server's workers joined") from None
        self.connected = True

    def _join(self, joined: Future[NcclCommunicator], unique_id: bytes, ranks: int) -> None:
        group = failure = None
        try:
            group = self._gpu.join(unique_id, ranks)
        except Exception as error:  # noqa: BLE001  The boundary of the thread: the error belongs to the waiting caller.
            failure = error
        if not joined.set_running_or_notify_cancel():  # Nobody waits any more.
            if group is not None:
                group.abort()
        elif group is not None:
            joined.set_result(group)
        else:
            joined.set_exception(failure)

    def _transfer(self, weights: Weights, send_update: SendUpdate) -> None:
        import torch

        if not self.connected or self._joined is None:
            raise TransferError("the workers of the server are not connected")
        group = self._joined.result()
        reply = self._post(send_update, manifest(weights))
        for batch in pack_over(weights.values(), self._buffer_bytes):
            group.broadcast(torch.cat([as_bytes(tensor) for tensor in batch]))
            self._progress()
        wait_for_reply(reply)

    def abort(self) -> None:
        super().abort()
        joined = self._joined
        if joined is not None and not joined.cancel() and joined.exception() is None:
            joined.result().abort()


def pack_over(tensors: Iterable[Tensor], limit: int) -> Generator[list[Tensor]]:
    """Batches that each end with the tensor that exceeds `limit` bytes: where vLLM's NCCL engine cuts."""
    batch: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        batch.append(tensor)
        filled += tensor.nbytes
        if filled > limit:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


# -- cuda ipc --------------------------------------------------------------------------------------------------------

SERVER_ENVIRONMENT = {"ipc": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}}
"""Environment variables that a server started here needs for a transport: to accept handles over HTTP."""


class CudaIpcSender(WeightSender):
    """`WeightSender` to a server on the same GPU.

    The trainer fills a buffer and sends the server a CUDA handle to it; the server copies the content before it
    replies, and the next buffer follows. The handle travels as a pickle, because that is what vLLM accepts over HTTP.
    Nothing is unpickled here."""

    _gpu: CudaMemory

    def init_info(self, workers: int) -> dict[str, Any]:
        if workers != 1:
            raise TransferError(f'the server has {workers} workers, and one GPU is shared with one; use "nccl"')
        return {"packed": True}

    def connect(self) -> None:
        self.connected = True

    def _transfer(self, weights: Weights, send_update: SendUpdate) -> None:
        sizes = [tensor.nbytes for tensor in weights.values()]
        buffer = self._gpu.allocate(max(max(sizes, default=0), min(self._buffer_bytes, sum(sizes))))
        handle = base64.b64encode(pickle.dumps(self._gpu.handle(buffer))).decode()
        try:
            for batch in pack_within(weights, len(buffer)):
                self._fill(buffer, batch)
                batch_sizes = [tensor.nbytes for tensor in batch.values()]
                update = {**manifest(batch), "tensor_sizes": batch_sizes, "ipc_handles_pickled": handle}
                wait_for_reply(self._post(send_update, update))
                self._progress()
        finally:
            del buffer
            self._gpu.collect()

    def _fill(self, buffer: Tensor, batch: Weights) -> None:
        start = 0
        for tensor in batch.values():
            buffer[start : start + tensor.nbytes].copy_(as_bytes(tensor))
            start += tensor.nbytes
        self._gpu.synchronize()


def pack_within(weights: Weights, limit: int) -> Generator[dict[str, Tensor]]:
    """Batches of at most `limit` bytes."""
    batch: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in weights.items():
        if batch and filled + tensor.nbytes > limit:
            yield batch
            batch, filled = {}, 0
        batch[name] = tensor
        filled += tensor.nbytes
    if batch:
        yield batch


class CudaMemory:
    """The memory of a GPU that both processes can open. Create it with `CudaMemory.open`."""

    def __init__(self, device: str) -> None:
        self._device = device

    @classmethod
    def open(cls, device: str) -> CudaMemory:
        """Raises ConfigError if `device` is not a GPU."""
        _require_gpu("ipc", device)
        return cls(device)

    def allocate(self, size: int) -> Tensor:
        """A buffer of `size` bytes."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def handle(self, buffer: Tensor) -> dict[str, Any]:
        """The GPU's UUID -> the arguments with which another process opens the buffer."""
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(buffer)
        return {str(torch.cuda.get_device_properties(self._device).uuid): arguments}

    def synchronize(self) -> None:
        """Returns when all writes to buffers have completed."""
        import torch

        torch.cuda.current_stream(self._device).synchronize()

    def collect(self) -> None:
        """Free what no other process uses any more."""
        import torch

        torch.cuda.ipc_collect()


def _require_gpu(transport: str, device: str) -> None:
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise ConfigError(f'transfer="{transport}" needs the trainer on a GPU, and it is on {device}; use "disk"')


# -- selection -------------------------------------------------------------------------------------------------------

DISK = "disk"
AUTO = "auto"
SENDERS: dict[str, Callable[[str], WeightSender]] = {
    "nccl": lambda device: NcclSender(NcclLibrary.open(device)),
    "ipc": lambda device: CudaIpcSender(CudaMemory.open(device)),
}
"""Name of vLLM's weight-transfer engine -> factory of a sender to one server, for a trainer on a device. The factory
raises ConfigError if this machine lacks what it needs."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def select_transport(requested: str, device: str, devices: Sequence[str]) -> str:
    """The transport for a trainer on `device` and servers started on `devices` (CUDA_VISIBLE_DEVICES of each). `auto`
    becomes the disk wherever the GPU of a process is not certain. Raises ConfigError if the requested transport is
    impossible."""
    if requested != AUTO:
        if requested != DISK:
            SENDERS[requested](device)
        return requested
    if not device.startswith("cuda") or not devices:
        return DISK
    index = int(device.partition(":")[2] or 0)
    visible = [name.strip() for name in os.environ.get(VISIBLE_DEVICES, "").split(",") if name.strip()]
    own = visible[index] if index < len(visible) else str(index)
    theirs = [[name.strip() for name in each.split(",")] for each in devices]
    if all(each == [own] for each in theirs):
        transport = "ipc"
    elif any(own in each for each in theirs):  # NCCL accepts each GPU once.
        return DISK
    else:
        transport = "nccl"
    try:
        SENDERS[transport](device)
    except ConfigError:
        return DISK
    return transport
