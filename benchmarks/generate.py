"""Our generator beside `model.generate` and transformers' continuous batching: tokens per CPU second, one thread.

    python benchmarks/generate.py [--runs 7] [--peer/--no-peer] [--json]

A Llama of 0.9M parameters, 64 prompts of 100 tokens, 48 new tokens each, drawn at temperature 1 (`uneven`: 8 to 48 of
them, where one padded batch goes on for all until the longest is done; only asked-for tokens count). The arms take
turns, so that what else the machine does falls on all of them; the medians of the runs are compared. Each run of ours
begins with nothing stored, as after a change of the weights.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import logging
import random
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local.scheduler import ContinuousBatcher

PROMPTS, GROUP, PROMPT, NEW, VOCABULARY = 64, 8, 100, 48, 512
Prompts = list[list[int]]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def make_prompts(distinct: int) -> Prompts:
    rng = random.Random(distinct)
    prompts = [[rng.randrange(1, VOCABULARY) for _ in range(PROMPT)] for _ in range(distinct)]
    return [prompts[i * distinct // PROMPTS] for i in range(PROMPTS)]


def ours(model: LlamaForCausalLM) -> Callable[[Prompts, list[int]], None]:
    engine = ContinuousBatcher(model, eos_token_ids=frozenset(), decode=lambda _: "", context_length=2048)

    def run(prompts: Prompts, lengths: list[int]) -> None:
        engine.invalidate_cache()
        requests = [
            engine.submit(prompt, SamplingParams(max_tokens=length))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        while not engine.idle:
            engine.step()
        assert [len(request.logprobs) for request in requests] == lengths

    return run


def by_generate(model: LlamaForCausalLM) -> Callable[[Prompts, list[int]], None]:
    def run(prompts: Prompts, lengths: list[int]) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(lengths), do_sample=True, top_k=0
            )
        assert out.shape == (PROMPTS, PROMPT + max(lengths))

    return run


def by_continuous_batching(model: LlamaForCausalLM) -> Callable[[Prompts, list[int]], None]:
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=2048, return_logprobs=True)

    def run(prompts: Prompts, lengths: list[int]) -> None:
        with torch.no_grad():  # Its thread cannot write to inference tensors.
            out = model.generate_batch(prompts, generation, batching, max_new_tokens=max(lengths))
        assert all(len(each.generated_tokens) == max(lengths) for each in out.values())

    return run


def cpu_seconds(run: Callable[[Prompts, list[int]], None], prompts: Prompts, lengths: list[int]) -> float:
    start = time.process_time()
    run(prompts, lengths)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="also continuous batching")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    model = make_model()
    arms = {"ours": ours(model), "model.generate": by_generate(model)}
    if options.peer:
        arms["transformers continuous batching"] = by_continuous_batching(make_model())
    rng = random.Random(0)
    cases = {
        "groups of 8 share a prompt": (make_prompts(PROMPTS // GROUP), [NEW] * PROMPTS),
        "nothing shared": (make_prompts(PROMPTS), [NEW] * PROMPTS),
        "nothing shared, uneven answers": (make_prompts(PROMPTS), [rng.randint(8, NEW) for _ in range(PROMPTS)]),
    }
    results: dict[str, dict[str, float]] = {}
    for case, (prompts, lengths) in cases.items():
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(options.runs + 1):
            for name, run in arms.items():
                spent = cpu_seconds(run, prompts, lengths)
                if turn:  # The first one of each warms up.
                    seconds[name].append(spent)
        results[case] = {name: sum(lengths) / statistics.median(each) for name, each in seconds.items()}
    report(results, as_json=options.json)


def report(results: dict[str, dict[str, float]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results))
        return
    for case, speeds in results.items():
        print(f"{case}: generated tokens per CPU second, and ours beside it")
        for name, speed in speeds.items():
            print(f"  {name:34}{speed:8.0f}   {speeds['ours'] / speed:5.2f}x")


if __name__ == "__main__":
    main()
