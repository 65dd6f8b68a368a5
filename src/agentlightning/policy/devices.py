"""Names the devices that torch finds on this machine."""

from __future__ import annotations

from typing import Any

import torch


def torch_devices() -> dict[str, Any]:
    """Torch's version, the CUDA version that it was built for, and the accelerators of this machine."""
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())],
        "mps": torch.backends.mps.is_available(),
    }
