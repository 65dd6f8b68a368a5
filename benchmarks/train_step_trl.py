"""The TRL side of `train_step.py`: runs in TRL's own environment and knows nothing of Agent Lightning.

    python train_step_trl.py JOB.json

The job names a model directory, prompts and settings. For each optimiser step it writes one line of JSON: CPU seconds
of each phase, and the tokens and advantages that were trained on, so that the other side can train on the same.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: Any) -> list[float]:
    """A number of its own for every answer, so that no group is without spread."""
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]


class Clock:
    """CPU seconds by phase of the current step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = inner(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - start
            return result

        setattr(owner, name, timed)


class Recorder(TrainerCallback):
    """Writes a line for each step."""

    def __init__(self, clock: Clock, path: Path) -> None:
        self.clock, self.path, self.batch = clock, path, dict[str, Any]()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.started = time.process_time()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.clock.seconds["optimizer"] = time.process_time() - self.started

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = self.clock.seconds
        phases = {
            "generate": seconds["prepare"],
            "forward and backward": seconds["training_step"] - seconds["prepare"],
            "clip and step": seconds["optimizer"] + seconds.get("clip", 0.0),
        }
        with self.path.open("a") as file:
            file.write(json.dumps({"phases": phases, **self.batch}) + "\n")
        self.clock.seconds = {}

    def keep(self, output: dict[str, Any]) -> None:
        rows = zip(
            output["prompt_ids"],
            output["prompt_mask"],
            output["completion_ids"],
            output["completion_mask"],
            strict=True,
        )
        self.batch = {
            "rows": [[p[pm.bool()].tolist(), c[cm.bool()].tolist()] for p, pm, c, cm in rows],
            "advantages": output["advantages"].tolist(),
        }


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    config = GRPOConfig(
        output_dir=job["scratch"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["group_size"] * len(job["prompts"]) // job["micro_batch"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        seed=job["seed"],
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": job["prompts"]}),
    )
    clock = Clock()
    recorder = Recorder(clock, Path(job["output"]))
    trainer.add_callback(recorder)
    generate = trainer._generate_and_score_completions

    def generate_and_keep(inputs: Any) -> Any:
        output = generate(inputs)
        recorder.keep(output)
        return output

    trainer._generate_and_score_completions = generate_and_keep
    clock.wrap(trainer, "_prepare_inputs", "prepare")
    clock.wrap(trainer, "training_step", "training_step")
    clock.wrap(trainer.accelerator, "clip_grad_norm_", "clip")
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
