"""The binding of NCCL, checked against its header."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch

from agentlightning.weight_sync.transfer import UNIQUE_ID_BYTES, NcclLibrary, TransferError


class Call:
    """A function of a C library."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], result: int = 0) -> None:
        self.name, self.calls, self.result = name, calls, result

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append((self.name, *arguments))
        return b"invalid usage" if self.name == "ncclGetErrorString" else self.result


class NcclOnPaper:
    """libnccl, as far as its declarations go: no GPU is needed to see what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Call:
        function = Call(name, self.calls)
        setattr(self, name, function)
        return function


def test_nccl_is_called_as_its_header_declares(monkeypatch: pytest.MonkeyPatch):
    paper, zeros = NcclOnPaper(), torch.zeros
    stream = types.SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    library: Any = paper
    nccl = NcclLibrary(library, "cuda:0")
    unique_id = nccl.unique_id()
    assert len(unique_id) == UNIQUE_ID_BYTES
    group = nccl.join(unique_id, 3)
    data = torch.arange(7, dtype=torch.uint8)
    group.broadcast(data)
    group.abort()
    with pytest.raises(TransferError, match="aborted"):
        group.broadcast(data)
    (got, joined, summed, sent) = paper.calls[:4]
    assert got[0] == "ncclGetUniqueId"
    assert (joined[0], joined[2], bytes(joined[3]), joined[4]) == ("ncclCommInitRank", 3, unique_id, 0)
    assert (summed[0], summed[3:6], summed[7]) == ("ncclAllReduce", (1, 7, 0), 77)  # One float, summed up.
    where = data.data_ptr()
    assert (sent[0], sent[1:6], sent[7]) == ("ncclBroadcast", (where, where, 7, 1, 0), 77)  # Bytes, from rank 0.
    paper.ncclGetUniqueId.result = 5
    with pytest.raises(TransferError, match="ncclGetUniqueId: invalid usage"):
        nccl.unique_id()
