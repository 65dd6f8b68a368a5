"""Selection of the transport."""

from __future__ import annotations

import pytest

from agentlightning.errors import ConfigError
from agentlightning.weight_sync import transfer as select
from agentlightning.weight_sync.transfer import CudaMemory, NcclLibrary


@pytest.mark.parametrize(
    ("device", "devices", "visible", "way"),
    [
        ("cpu", ("0",), None, "disk"),
        ("cuda:0", (), None, "disk"),
        ("cuda:0", ("1", "2,3"), None, "nccl"),
        ("cuda", ("0",), None, "ipc"),
        ("cuda:0", ("0", "1"), None, "disk"),
        ("cuda:0", ("1, 0",), None, "disk"),
        ("cuda:1", ("0",), None, "nccl"),
        ("cuda:1", ("7",), "4,7", "ipc"),
        ("cuda:1", ("4",), "4,7", "nccl"),
    ],
)
def test_auto_selects_by_device_assignment(
    monkeypatch: pytest.MonkeyPatch, device: str, devices: tuple[str, ...], visible: str | None, way: str
):
    for name in select.SENDERS:
        monkeypatch.setitem(select.SENDERS, name, lambda device: object())
    monkeypatch.setenv(select.VISIBLE_DEVICES, visible) if visible else monkeypatch.delenv(
        select.VISIBLE_DEVICES, raising=False
    )
    assert select.select_transport("auto", device, devices) == way


def test_auto_falls_back_to_disk_and_named_transports_are_rejected():
    assert select.select_transport("auto", "cuda:0", ("1",)) == "disk"
    assert select.select_transport("disk", "cpu", ()) == "disk"
    for way in ("nccl", "ipc"):
        with pytest.raises(ConfigError, match=f'transfer="{way}" needs the trainer on a GPU, and it is on cpu'):
            select.select_transport(way, "cpu", ())
    for leaf in (NcclLibrary, CudaMemory):
        with pytest.raises(ConfigError, match="needs the trainer on a GPU"):
            leaf.open("cuda:0")
