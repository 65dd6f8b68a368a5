"""Weight transfer on one GPU that trainer and server share, for vLLM's weight-transfer engine `ipc`.

The trainer fills a buffer and sends the server a CUDA handle to it; the server copies the content before it replies,
and the next buffer follows. The handle travels as a pickle, because that is what vLLM accepts over HTTP: the server
needs VLLM_ALLOW_INSECURE_SERIALIZATION=1. Nothing is unpickled here.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Generator
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
    num_bytes,
    wait_for_reply,
)

if TYPE_CHECKING:
    from torch import Tensor

SERVER_ENVIRONMENT: Final = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Environment variables that a server needs to accept handles over HTTP."""


class CudaIpcSender:
    """`WeightSender` to a server on the same GPU."""

    def __init__(
        self, memory: CudaMemory, *, buffer_bytes: int = BUFFER_BYTES, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._memory = memory
        self._buffer_bytes = buffer_bytes
        self._stall_seconds = stall_seconds
        self._reply: Future[Any] | None = None
        self.connected = False

    def init_info(self, workers: int) -> dict[str, Any]:
        if workers != 1:
            raise TransferError(f'the server has {workers} workers, and one GPU is shared with one; use "nccl"')
        return {"packed": True}

    def connect(self) -> None:
        self.connected = True

    def send(self, weights: Weights, send_update: SendUpdate) -> None:
        sizes = [num_bytes(tensor) for tensor in weights.values()]
        buffer = self._memory.allocate(max(max(sizes, default=0), min(self._buffer_bytes, sum(sizes))))
        handle = base64.b64encode(pickle.dumps(self._memory.handle(buffer))).decode()
        timer = StallTimer(self.abort, self._stall_seconds)
        try:
            with timer.running():
                for batch in pack_within(weights, len(buffer)):
                    self._fill(buffer, batch)
                    batch_sizes = [num_bytes(tensor) for tensor in batch.values()]
                    update = {**manifest(batch), "tensor_sizes": batch_sizes, "ipc_handles_pickled": handle}
                    self._reply = reply = send_update(update)
                    wait_for_reply(reply)
                    timer.progress()
        except BaseException as error:
            self.abort()
            if timer.expired:
                raise TransferError(f"the server accepted nothing for {self._stall_seconds:g} s") from error
            raise
        finally:
            self._reply = None
            del buffer
            self._memory.collect()

    def _fill(self, buffer: Tensor, batch: Weights) -> None:
        start = 0
        for tensor in batch.values():
            buffer[start : start + num_bytes(tensor)].copy_(as_bytes(tensor))
            start += num_bytes(tensor)
        self._memory.synchronize()

    def abort(self) -> None:
        self.connected = False
        if (reply := self._reply) is not None:
            reply.cancel()


def pack_within(weights: Weights, limit: int) -> Generator[dict[str, Tensor]]:
    """Batches of at most `limit` bytes."""
    batch: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in weights.items():
        if batch and filled + num_bytes(tensor) > limit:
            yield batch
            batch, filled = {}, 0
        batch[name] = tensor
        filled += num_bytes(tensor)
    if batch:
        yield batch


class CudaMemory:
    """The memory of a GPU that both processes can open. Create it with `CudaMemory.open`."""

    def __init__(self, device: str) -> None:
        self._device = device

    @classmethod
    def open(cls, device: str) -> CudaMemory:
        """Raises ConfigError if `device` is not a GPU."""
        import torch

        if not device.startswith("cuda") or not torch.cuda.is_available():
            raise ConfigError(f'transfer="ipc" needs the trainer on a GPU, and it is on {device}; use "disk"')
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
