"""Supervised learning with Unsloth on the successful sessions of a store: a CUDA machine, one command.

    python train.py --store .agentlightning/store.db --model unsloth/Qwen3-1.7B --output adapter

Unsloth loads the model in four bits and adds a LoRA adapter; `agl.SFTAlgorithm` trains that adapter in place and writes
it with Unsloth's own `save_pretrained`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.algorithms.sft import SFTResult

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer) with a new adapter. Exits where Unsloth is missing, or finds no GPU."""
    try:
        from unsloth import FastLanguageModel  # before transformers, whose models it replaces
    except ModuleNotFoundError as error:
        sys.exit(f"this example needs the module {error.name}: pip install unsloth  (see README.md for its versions)")
    except NotImplementedError as error:
        sys.exit(f"Unsloth cannot run on this machine: {error}")
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=options.model, max_seq_length=options.max_length, load_in_4bit=not options.no_4bit
    )
    model = FastLanguageModel.get_peft_model(
        model, r=options.rank, lora_alpha=2 * options.rank, lora_dropout=0.0, target_modules=TARGETS, random_state=0
    )
    return model, tokenizer


def train(options: argparse.Namespace) -> SFTResult:
    store = agl.LightningStore(options.store)
    dataset = store.get_successful_trajectories(threshold=options.threshold, best_of=options.best_of)
    return agl.SFTAlgorithm(
        model=load(options),
        dataset=dataset,
        output=options.output,
        epochs=options.epochs,
        batch_size=options.batch_size,
        target_agent=options.target_agent,
        validation_share=options.validation_share,
        optimizer={"lr": options.lr},
    ).train()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, type=Path, help="the store with the sessions: a file")
    parser.add_argument("--model", required=True, help="a directory or the name of a model that Unsloth loads")
    parser.add_argument("--output", required=True, type=Path, help="the directory for the adapter")
    parser.add_argument("--threshold", type=float, default=1.0, help="the least reward of a successful session")
    parser.add_argument("--best-of", type=int, default=1, help="sessions of each task")
    parser.add_argument("--target-agent", help="only this agent's answers are learned")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--no-4bit", action="store_true", help="load the weights in 16 bits")
    parser.add_argument("--validation-share", type=float, default=0.0)
    options = parser.parse_args(arguments)
    if not options.store.exists():
        parser.error(f"there is no store {options.store}")
    return options


if __name__ == "__main__":
    try:
        print(json.dumps(train(parse()).as_json(), indent=2))
    except agl.errors.AgentLightningError as error:
        sys.exit(str(error))
