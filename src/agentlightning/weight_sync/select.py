"""Which way weights travel to the servers of a run, by what its configuration says and its machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.weight_sync.base import Courier
from agentlightning.weight_sync.cuda_ipc import ENVIRONMENT, CudaMemory, IpcCourier
from agentlightning.weight_sync.nccl import Nccl, NcclCourier

DISK: Final = "disk"
AUTO: Final = "auto"
COURIERS: Final[dict[str, Callable[[str], Courier]]] = {
    "nccl": lambda device: NcclCourier(Nccl.open(device)),
    "ipc": lambda device: IpcCourier(CudaMemory.open(device)),
}
"""Name, which is that of vLLM's weight-transfer engine -> makes the courier to one server, for a trainer on a device.
Each raises ConfigError where this machine has not what it needs."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def environment(way: str) -> dict[str, str]:
    """What servers we start need for it, beside their options."""
    return dict(ENVIRONMENT) if way == "ipc" else {}


def choose(wanted: str, device: str, devices: Sequence[str]) -> str:
    """The way that `wanted` comes to for a trainer on `device` and servers started on `devices` (CUDA_VISIBLE_DEVICES
    of each). `auto` is the disk wherever it is not certain who has which GPU. Raises ConfigError where the way cannot
    be."""
    if wanted != AUTO:
        if wanted != DISK:
            COURIERS[wanted](device)
        return wanted
    if not device.startswith("cuda") or not devices:
        return DISK
    own, theirs = _name(device), [[name.strip() for name in each.split(",")] for each in devices]
    if all(each == [own] for each in theirs):
        way = "ipc"
    elif any(own in each for each in theirs):  # NCCL takes a GPU once.
        return DISK
    else:
        way = "nccl"
    try:
        COURIERS[way](device)
    except ConfigError:
        return DISK
    return way


def _name(device: str) -> str:
    """A device of ours as CUDA_VISIBLE_DEVICES names it."""
    index = int(device.partition(":")[2] or 0)
    visible = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return visible[index] if index < len(visible) else str(index)
