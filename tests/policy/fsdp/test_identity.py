"""What ranks are compared by."""

from __future__ import annotations

from dataclasses import replace

import torch

from agentlightning.policy.fsdp.identity import code, model_digest
from agentlightning.testing.models import tiny_model


def test_a_model_differs_from_one_with_other_weights_or_another_shape() -> None:
    model = tiny_model()
    own = model_digest(model)
    assert own == model_digest(tiny_model())
    assert own != model_digest(tiny_model(seed=1))
    assert own != model_digest(tiny_model("qwen3"))
    with torch.no_grad():
        model.get_output_embeddings().weight[0, 0] += 1.0
    assert own != model_digest(model)


def test_a_process_with_another_package_or_other_sources_is_described() -> None:
    own = code()
    assert own.difference(own) == ""
    packages = tuple((name, "0.1" if name == "torch" else version) for name, version in own.packages)
    assert "torch 0.1 and not" in own.difference(replace(own, packages=packages))
    assert "other source files of agentlightning" in own.difference(replace(own, digest="another"))
