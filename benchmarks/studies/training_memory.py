"""What an update of a pretrained model needs of memory, beside the formula of docs/get-started/one-gpu.md.

    python benchmarks/studies/training_memory.py [--tokens 1024 2048] [--dtype float32]

SmolLM2-135M-Instruct on a CPU: all weights or LoRA of rank 16, with and without gradient checkpointing. The measure is
the peak of the resident memory of a process, less what it had before it opened the model. A small update comes first,
which allocates the state of the optimiser; the measured one computes so many tokens in one micro-batch, as rollouts of
256 random tokens, 24 of them a prompt. Each case has a new process.
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

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "arms"))
PAGE = HERE.parent / "docs" / "get-started" / "one-gpu.md"
MODEL, PROMPT, ANSWER, RANK = "smollm2-135m", 24, 232, 16
CASES = {
    "all weights": (0, False),
    "all weights, checkpointing": (0, True),
    "LoRA": (RANK, False),
    "LoRA, checkpointing": (RANK, True),
}


def formula() -> dict[str, Any]:
    """The functions of the page."""
    found = re.search(r"^```python file=memory.py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    namespace: dict[str, Any] = {}
    exec(found[1], namespace)
    return namespace


def groups(tokens: int) -> list[dict[str, Any]]:
    """Pairs of rollouts that share no prompt with others."""
    draw = random.Random(0)

    def words(count: int) -> list[int]:
        return [draw.randrange(3, 49000) for _ in range(count)]

    count = max(1, tokens // (PROMPT + 2 * ANSWER))
    return [
        {"prompt": words(PROMPT), "answers": [words(ANSWER), words(ANSWER)], "rewards": [0.0, 1.0]}
        for _ in range(count)
    ]


def measure(tokens: int, dtype: Any, rank: int, checkpointing: bool) -> dict[str, Any]:
    """In this process."""
    from line import resident_mb
    from real_ours import samples

    from agentlightning.models.resolve import resolve_model
    from agentlightning.policy.base import UpdateOptions
    from agentlightning.policy.config import LocalPolicyConfig, Lora
    from agentlightning.policy.local import LocalPolicy

    first, batch = samples(groups(1)), samples(groups(tokens))
    config = LocalPolicyConfig(
        model=resolve_model(MODEL),
        dtype=dtype,
        lora=Lora(r=rank) if rank else None,
        gradient_checkpointing=checkpointing,
    )
    before = resident_mb("self", "VmRSS")

    async def update() -> dict[str, float]:
        policy = LocalPolicy.open(config)
        await policy.train(first, UpdateOptions(token_budget=2 * tokens))
        metrics = await policy.train(batch, UpdateOptions(token_budget=2 * tokens))
        await policy.close()
        return dict(metrics)

    metrics = asyncio.run(update())
    return {"mb": resident_mb("self", "VmHWM") - before, **metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*json.loads(given.one))))
        return
    training_gb = formula()["training_gb"]
    print(f"{'':28}{'tokens':>8}{'passes':>8}{'measured':>10}{'formula':>10}{'ratio':>7}")
    for name in given.cases:
        for tokens in given.tokens:
            command = [sys.executable, __file__, "--one", json.dumps([tokens, given.dtype, *CASES[name]])]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            computed, passes = int(found["tokens_computed"]), int(found["micro_batches"])
            gb = found["mb"] * 1.048576e-3
            expected = training_gb(MODEL, computed / passes, *CASES[name], given.dtype)
            print(f"{name:28}{computed:8}{passes:8}{gb:9.2f}G{expected:9.2f}G{gb / expected:7.2f}", flush=True)


if __name__ == "__main__":
    main()
