"""Weights on one GPU that trainer and server share, as vLLM's weight-transfer engine `ipc` receives them.

The trainer fills a buffer and names it to the server by a CUDA handle, which copies what it holds before it answers;
then comes the next. The handle travels as a pickle, because that is how vLLM takes it over HTTP: the server wants
VLLM_ALLOW_INSECURE_SERIALIZATION=1. Nothing is unpickled here.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Generator
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
    size,
)

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT: Final = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""What a server wants that takes handles over HTTP."""


class Memory(Protocol):
    """The GPU that both sides see."""

    def buffer(self, size: int) -> Tensor:
        """So many bytes of it."""
        ...

    def handle(self, buffer: Tensor) -> dict[str, Any]:
        """The GPU's UUID -> what another process opens the buffer with."""
        ...

    def settle(self) -> None:
        """Returns when what was written to a buffer is there."""
        ...

    def collect(self) -> None:
        """Take back what no other process uses any more."""
        ...


class IpcCourier:
    """To a server on the same GPU. See `transfer.base.Courier`."""

    def __init__(
        self, memory: Memory, *, buffer_bytes: int = BUFFER_BYTES, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._memory = memory
        self._buffer_bytes = buffer_bytes
        self._silence = silence_seconds
        self._told: Future[Any] | None = None
        self.joined = False

    def invite(self, workers: int) -> dict[str, Any]:
        if workers != 1:
            raise TransferError(f'the server has {workers} workers, and one GPU is shared with one; use "nccl"')
        return {"packed": True}

    def join(self) -> None:
        self.joined = True

    def send(self, weights: Weights, tell: Tell) -> None:
        largest = max(map(size, weights.values()), default=0)
        buffer = self._memory.buffer(max(largest, min(self._buffer_bytes, sum(map(size, weights.values())))))
        handle = base64.b64encode(pickle.dumps(self._memory.handle(buffer))).decode()
        watch = Watch(self.abort, self._silence)
        try:
            with watch.running():
                for run in fitting(weights, len(buffer)):
                    self._fill(buffer, run)
                    sizes = [size(tensor) for tensor in run.values()]
                    told = tell({**manifest(run), "tensor_sizes": sizes, "ipc_handles_pickled": handle})
                    self._told = told
                    answer(told)
                    watch.progress()
        except BaseException as error:
            self.abort()
            if watch.silent:
                raise TransferError(f"the server took nothing for {self._silence:g} s") from error
            raise
        finally:
            self._told = None
            del buffer
            self._memory.collect()

    def _fill(self, buffer: Tensor, run: Weights) -> None:
        start = 0
        for tensor in run.values():
            buffer[start : start + size(tensor)].copy_(flat(tensor))
            start += size(tensor)
        self._memory.settle()

    def abort(self) -> None:
        self.joined = False
        if (told := self._told) is not None:
            told.cancel()


def fitting(weights: Weights, limit: int) -> Generator[dict[str, Tensor]]:
    """In runs of at most `limit` bytes."""
    run: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in weights.items():
        if run and filled + size(tensor) > limit:
            yield run
            run, filled = {}, 0
        run[name] = tensor
        filled += size(tensor)
    if run:
        yield run


class CudaMemory:
    """CUDA's own. Make it with `CudaMemory.open`."""

    def __init__(self, device: str) -> None:
        self._device = device

    @classmethod
    def open(cls, device: str) -> CudaMemory:
        """Raises ConfigError where `device` is no GPU."""
        import torch

        if not device.startswith("cuda") or not torch.cuda.is_available():
            raise ConfigError(f'transfer="ipc" needs the trainer on a GPU, and it is on {device}; use "disk"')
        return cls(device)

    def buffer(self, size: int) -> Tensor:
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def handle(self, buffer: Tensor) -> dict[str, Any]:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(buffer)
        return {str(torch.cuda.get_device_properties(self._device).uuid): arguments}

    def settle(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).synchronize()

    def collect(self) -> None:
        import torch

        torch.cuda.ipc_collect()
