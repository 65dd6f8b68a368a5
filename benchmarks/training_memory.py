"""What an update of a pretrained model needs of memory, beside the formula of docs/guides/one-gpu.md.

    python benchmarks/training_memory.py [--tokens 1024 2048 4096]

SmolLM2-135M-Instruct on a CPU in bfloat16: all weights or LoRA of rank 16, with and without gradient checkpointing. The
measure is the peak of the resident memory of a process that makes two updates, less what the process had before it
opened the model. Each case has a new process. Rollouts are a prompt of 24 random tokens and an answer of 232.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "arms"))
PAGE = HERE.parent / "docs" / "guides" / "one-gpu.md"
MODEL, PROMPT, ANSWER = "smollm2-135m", 24, 232


def formula() -> dict[str, Any]:
    """The functions of the page."""
    found = re.search(r"^```python file=memory.py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    namespace: dict[str, Any] = {}
    exec(found[1], namespace)
    return namespace


def measure(tokens: int, rank: int, checkpointing: bool) -> dict[str, Any]:
    """In this process."""
    from line import resident_mb
    from real_ours import samples

    from agentlightning.models.resolve import resolve_model
    from agentlightning.policy.local import LocalPolicy
    from agentlightning.policy.local_config import LocalPolicyConfig
    from agentlightning.policy.lora_config import Lora

    draw = random.Random(0)
    groups = [
        {
            "prompt": [draw.randrange(3, 49000) for _ in range(PROMPT)],
            "answers": [[draw.randrange(3, 49000) for _ in range(ANSWER)] for _ in range(2)],
            "rewards": [0.0, 1.0],
        }
        for _ in range(tokens // (2 * (PROMPT + ANSWER)))
    ]
    batch = samples(groups)
    before = resident_mb("self", "VmRSS")
    config = LocalPolicyConfig(
        model=resolve_model(MODEL),
        dtype="bfloat16",
        lora=Lora(r=rank) if rank else None,
        gradient_checkpointing=checkpointing,
    )

    async def update() -> dict[str, float]:
        policy = LocalPolicy.open(config)
        await policy.train(batch, token_budget=2 * tokens)
        metrics = await policy.train(batch, token_budget=2 * tokens)
        await policy.close()
        return dict(metrics)

    metrics = asyncio.run(update())
    return {"mb": resident_mb("self", "VmHWM") - before, **metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(*json.loads(given.case))))
        return
    training_gb = formula()["training_gb"]
    print(f"{'':28}{'tokens':>8}{'passes':>8}{'measured':>10}{'formula':>10}{'ratio':>7}")
    for name, rank, checkpointing in (
        ("all weights", 0, False),
        ("all weights, checkpointing", 0, True),
        ("LoRA", 16, False),
        ("LoRA, checkpointing", 16, True),
    ):
        for tokens in given.tokens:
            command = [sys.executable, __file__, "--case", json.dumps([tokens, rank, checkpointing])]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            computed, passes = int(found["tokens_computed"]), int(found["micro_batches"])
            gb, expected = found["mb"] * 1.048576e-3, training_gb(MODEL, computed / passes, rank, checkpointing)
            print(f"{name:28}{computed:8}{passes:8}{gb:9.2f}G{expected:9.2f}G{gb / expected:7.2f}", flush=True)


if __name__ == "__main__":
    main()
