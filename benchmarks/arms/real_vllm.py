"""vLLM on the CPU for `real_model.py`, with its engine in this process so that its CPU time is counted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

from vllm import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from line import measured, serve

MODELS: dict[str, LLM] = {}


def load(model: str, dtype: str, threads: int, context: int) -> dict[str, Any]:
    # `threads` is in OMP_NUM_THREADS.
    MODELS["one"] = LLM(model=model, dtype=dtype, max_model_len=context, max_num_seqs=64)
    return {}


def sample(prompts: list[list[int]], new: int) -> dict[str, Any]:
    params = SamplingParams(temperature=1.0, min_tokens=new, max_tokens=new, ignore_eos=True)
    MODELS["one"].reset_prefix_cache()

    def work() -> dict[str, Any]:
        made = MODELS["one"].generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return {"tokens": sum(len(each.outputs[0].token_ids) for each in made)}

    return measured(work)


if __name__ == "__main__":
    serve([load, sample])
