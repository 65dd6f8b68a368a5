"""What ranks are compared by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tests.support.models import tiny_checkpoint, tiny_model

from agentlightning.policy.fsdp.messages import code, model_digest


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
    assert own.difference(own) == ""
    packages = tuple((name, "0.1" if name == "torch" else version) for name, version in own.packages)
    assert "torch 0.1 and not" in own.difference(replace(own, packages=packages))
    assert "other source files of agentlightning" in own.difference(replace(own, digest="another"))
