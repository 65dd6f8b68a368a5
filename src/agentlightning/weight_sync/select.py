"""Selection of the weight transport of a run, from its configuration and the machine's devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.weight_sync.base import WeightSender
from agentlightning.weight_sync.cuda_ipc import SERVER_ENVIRONMENT, CudaIpcSender, CudaMemory
from agentlightning.weight_sync.nccl import NcclLibrary, NcclSender

DISK: Final = "disk"
AUTO: Final = "auto"
SENDERS: Final[dict[str, Callable[[str], WeightSender]]] = {
    "nccl": lambda device: NcclSender(NcclLibrary.open(device)),
    "ipc": lambda device: CudaIpcSender(CudaMemory.open(device)),
}
"""Name of vLLM's weight-transfer engine -> factory of a sender to one server, for a trainer on a device. The factory
raises ConfigError if this machine lacks what it needs."""
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


def server_environment(transport: str) -> dict[str, str]:
    """Environment variables that a server started here needs for the transport."""
    return dict(SERVER_ENVIRONMENT) if transport == "ipc" else {}


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
    own, theirs = _visible_name(device), [[name.strip() for name in each.split(",")] for each in devices]
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


def _visible_name(device: str) -> str:
    """The trainer's device as CUDA_VISIBLE_DEVICES names it."""
    index = int(device.partition(":")[2] or 0)
    visible = [name.strip() for name in os.environ.get(VISIBLE_DEVICES, "").split(",") if name.strip()]
    return visible[index] if index < len(visible) else str(index)
