"""Weight transfer through memory shared on one GPU."""

from __future__ import annotations

import base64
import pickle
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.weight_sync.transfer import CudaIpcSender, TransferError, pack_within

WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,  # Not contiguous.
    "c.bias": torch.ones(()),
    "d.weight": torch.arange(5, dtype=torch.float32),
}


sizes = st.lists(st.integers(0, 40), max_size=30)


@given(sizes, st.integers(1, 60))
def test_pack_within_exceeds_the_limit_only_for_a_single_tensor(lengths: list[int], limit: int):
    weights = {str(index): torch.zeros(length, dtype=torch.uint8) for index, length in enumerate(lengths)}
    runs = list(pack_within(weights, limit))
    assert [name for run in runs for name in run] == list(weights)
    assert all(len(run) == 1 or sum(tensor.nbytes for tensor in run.values()) <= limit for run in runs)


class Shared:
    """One GPU, as far as `CudaIpcSender` knows."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.settled = self.collected = 0

    def allocate(self, size: int) -> torch.Tensor:
        self.buffers.append(torch.zeros(size, dtype=torch.uint8))
        return self.buffers[-1]

    def handle(self, buffer: torch.Tensor) -> dict[str, Any]:
        return {"GPU-1": ("a handle", len(buffer))}

    def synchronize(self) -> None:
        self.settled += 1

    def collect(self) -> None:
        self.collected += 1


def test_a_shared_buffer_is_reused_only_after_the_server_copied_it():
    memory, told, found = Shared(), [], {}

    def tell(info: dict[str, Any]) -> Future[Any]:
        told.append(info)
        start = 0
        assert memory.settled == len(told)
        for name, dtype, shape, count in zip(
            info["names"], info["dtype_names"], info["shapes"], info["tensor_sizes"], strict=True
        ):
            part = memory.buffers[-1][start : start + count].clone()
            found[name] = part.view(getattr(torch, dtype)).reshape(shape)
            start += count
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    sender = CudaIpcSender(memory, buffer_bytes=62)
    with pytest.raises(TransferError, match="2 workers"):
        sender.init_info(2)
    assert sender.init_info(1) == {"packed": True}
    assert not sender.connected
    sender.connect()
    sender.send(WEIGHTS, tell)
    assert (sender.connected, memory.collected, len(memory.buffers), len(told)) == (True, 1, 1, 2)
    assert all(found[name].equal(tensor) for name, tensor in WEIGHTS.items())
    for info in told:
        assert pickle.loads(base64.b64decode(info["ipc_handles_pickled"])) == {"GPU-1": ("a handle", 62)}


def test_a_stalled_ipc_transfer_fails():
    sender = CudaIpcSender(Shared(), stall_seconds=0.05)
    sender.connect()
    with pytest.raises(TransferError, match=r"accepted nothing for 0\.05 s"):
        sender.send(WEIGHTS, lambda info: Future())
    assert not sender.connected
