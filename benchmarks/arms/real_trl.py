"""TRL's `GRPOTrainer` for `real_model.py`: runs in TRL's own environment and knows nothing of Agent Lightning.

In bfloat16 the weights stay in float32 and the forward pass runs under autocast (`bf16=True`), as is TRL's default.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
from line import measured, resident_mb, serve

STARTED = time.perf_counter()


def trainer(
    model: str, dtype: str, prompts: list[Any], reward: Callable[..., list[float]], scratch: str, lora: bool, **own: Any
) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=scratch,
        beta=0.0,
        temperature=1.0,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **own,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({key: [each[key] for each in prompts] for key in prompts[0]}),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if lora else None,
    )


# -- one update ------------------------------------------------------------------------------------------------------


def padded(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    fill = [[0] * (width - len(row)) for row in rows]
    ids = [f + row if left else row + f for f, row in zip(fill, rows, strict=True)]
    ones = [[1] * len(row) for row in rows]
    mask = [f + one if left else one + f for f, one in zip(fill, ones, strict=True)]
    return torch.tensor(ids), torch.tensor(mask)


class SecondStep(TrainerCallback):
    """Keeps when the second of two steps began and ended; the first one allocates the state of the optimiser."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.process_time(), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.answer["cpu_seconds"] = time.process_time() - self.began[0]
        self.answer["wall_seconds"] = time.perf_counter() - self.began[1]


def update(model: str, dtype: str, threads: int, lora: bool, groups: list[dict[str, Any]], lr: float) -> dict[str, Any]:
    torch.set_num_threads(threads)
    prompts = [group["prompt"] for group in groups for _ in group["answers"]]
    answers = [answer for group in groups for answer in group["answers"]]
    size = len(groups[0]["answers"])
    rewards = torch.tensor([group["rewards"] for group in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    prompt_ids, prompt_mask = padded(prompts, left=True)
    completion_ids, completion_mask = padded(answers, left=False)
    rows = micro_batch(len(answers), prompt_ids.shape[1] + completion_ids.shape[1])
    counter = SecondStep()
    with tempfile.TemporaryDirectory() as scratch:
        own = trainer(
            model, dtype, [{"prompt": "x"}] * len(groups), lambda completions, **_: [0.0] * len(completions), scratch,
            lora, per_device_train_batch_size=rows, gradient_accumulation_steps=len(answers) // rows,
            num_generations=size, max_completion_length=completion_ids.shape[1], max_steps=2, learning_rate=lr,
        )  # fmt: skip
        own._generate_and_score_completions = lambda _: {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": advantages.flatten(),
            "num_items_in_batch": completion_mask.sum(),
        }
        trained = [0]
        loss = own._compute_loss

        def counted(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
            trained[0] += int(inputs["completion_mask"].sum())
            return loss(model, inputs)

        own._compute_loss = counted
        own.add_callback(counter)
        whole = measured(lambda: {"ended": bool(own.train())})
    return {"peak_mb": whole["peak_mb"], "tokens": trained[0] // 2, "rows": rows, **counter.answer}


def micro_batch(rollouts: int, width: int) -> int:
    """The most rollouts of at most 8,192 tokens together that divide the batch, as our own token budget."""
    return max(n for n in range(1, rollouts + 1) if rollouts % n == 0 and (n == 1 or n * width <= 8192))


# -- training until a reward -----------------------------------------------------------------------------------------


class Until(TrainerCallback):
    def __init__(self, rewards: list[float], threshold: float) -> None:
        self.rewards, self.threshold = rewards, threshold

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        print(f"TRL: step {len(self.rewards)}, reward {self.rewards[-1]:.3f}", file=sys.stderr, flush=True)
        control.should_training_stop = control.should_training_stop or self.rewards[-1] >= self.threshold
        return control


def reward(
    model: str, dtype: str, threads: int, tasks: list[dict[str, int]], question: str, seed: int, steps: int,
    threshold: float, tasks_per_step: int, group_size: int, max_tokens: int, lr: float,
) -> dict[str, Any]:  # fmt: skip
    """Everything from the start of this process on is counted, as it is for `agl train`."""
    torch.set_num_threads(threads)
    means: list[float] = []

    def score(completions: list[Any], a: list[int], b: list[int], **_: Any) -> list[float]:
        found = [re.findall(r"\d+", each[0]["content"]) for each in completions]
        values = [float(bool(n) and int(n[-1]) == x + y) for n, x, y in zip(found, a, b, strict=True)]
        means.append(statistics.mean(values))
        return values

    prompts = [{"prompt": [{"role": "user", "content": question.format(**task)}], **task} for task in tasks]
    with tempfile.TemporaryDirectory() as scratch:
        own = trainer(
            model, dtype, prompts, score, scratch, False, per_device_train_batch_size=tasks_per_step * group_size,
            gradient_accumulation_steps=1, num_generations=group_size, max_completion_length=max_tokens,
            max_steps=steps, learning_rate=lr, seed=seed,
        )  # fmt: skip
        own.add_callback(Until(means, threshold))
        own.train()
    return {
        "cpu_seconds": time.process_time(),
        "wall_seconds": time.perf_counter() - STARTED,
        "peak_mb": resident_mb(what="VmHWM"),
        "steps": len(means),
        "rollouts": len(means) * tasks_per_step * group_size,
        "rewards": means,
        "reached": means[-1] >= threshold,
    }


if __name__ == "__main__":
    serve([update, reward])
