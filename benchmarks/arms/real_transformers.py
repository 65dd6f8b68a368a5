"""`model.generate` of transformers for `real_model.py`: one batch of all callers, padded on the left."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from line import measured, serve

MODELS: dict[str, Any] = {}


def load(model: str, dtype: str, threads: int, context: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    MODELS["one"] = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    return {}


def sample(prompts: list[list[int]], new: int) -> dict[str, Any]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def work() -> dict[str, Any]:
        with torch.inference_mode():
            made = MODELS["one"].generate(
                ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, do_sample=True, top_k=0, top_p=1.0,
                temperature=1.0, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return {"tokens": (made.shape[1] - width) * made.shape[0]}

    return measured(work)


if __name__ == "__main__":
    serve([load, sample])
