"""What ranks are compared by."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.models import tiny_checkpoint, tiny_model

from agentlightning.policy.fsdp.group import code, difference, model_digest


def test_a_model_differs_from_one_with_other_weights_or_another_shape(tmp_path: Path) -> None:
    own = model_digest(str(tiny_checkpoint(tmp_path / "own")))
    assert own == model_digest(str(tiny_checkpoint(tmp_path / "same")))
    assert own != model_digest(str(tiny_checkpoint(tmp_path / "seed", seed=1)))
    assert own != model_digest(str(tiny_checkpoint(tmp_path / "shape", "qwen3")))
    changed = tiny_model()
    with torch.no_grad():
        changed.get_output_embeddings().weight[0] += 1.0
    changed.save_pretrained(tmp_path / "changed")
    assert own != model_digest(str(tmp_path / "changed"))


def test_a_process_with_another_package_or_other_sources_is_described() -> None:
    own = code()
    assert difference(own, own) == ""
    assert f"torch 0.1 and not {own['torch']}" in difference(own, {**own, "torch": "0.1"})
    assert "other source files of agentlightning" in difference(own, dict.fromkeys(own, "another"))
