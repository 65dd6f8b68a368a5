"""Loaded by a vLLM server on the CPU, as a plugin: vLLM's own engine `nccl`, with gloo where NCCL would be.

Only what needs a GPU is replaced: the communicator and the streams. What the engine is told, how it cuts what it
receives and how it loads it is vLLM's own code. The other end is in
`test_transfer.py`.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = datetime.timedelta(seconds=60)


class Group:
    """What the engine calls of a communicator."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self.group = None


class Stream:
    def synchronize(self) -> None:
        pass


class Torch:
    """torch, but for what a CPU has not."""

    class cuda:
        @staticmethod
        def stream(_: Stream) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    class accelerator:
        @staticmethod
        def current_device_index() -> int:
            return 0

        @staticmethod
        def synchronize() -> None:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def join(init_info: Any, parallel_config: Any) -> Group:
    host, port = init_info.nccl_unique_id_bytes.rstrip(b"\0").decode().split(":")
    worker = parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank
    store = dist.TCPStore(host, int(port), is_master=False, timeout=PATIENCE, wait_for_workers=False)
    rank = worker + init_info.rank_offset
    group = dist.ProcessGroupGloo(store, rank, init_info.world_size, PATIENCE)
    group.allreduce([torch.zeros(1)]).wait()
    return Group(group)


def engine() -> Any:
    from vllm.distributed.weight_transfer import base, nccl_engine, packed_tensor

    nccl_engine.worker_init_process_group = join
    packed_tensor._get_streams = lambda _, count: (Stream(),) * count
    packed_tensor.torch = base.torch = Torch()
    return nccl_engine.NCCLWeightTransferEngine


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory._registry["nccl"] = engine
