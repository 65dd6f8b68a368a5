"""One optimiser step of ours beside TRL's GRPOTrainer, and shared computation beside one padded row per call.

    python benchmarks/train_step.py --trl-python ENV/bin/python

Times are CPU seconds of one torch thread (`time.process_time`), medians, arms alternating. TRL runs in an environment
of its own (it wants packages we do not); without one its part is left out and the rest is measured.

Part 1, both arms on the same model, prompts and sampled tokens: 16 prompts x 8 completions of at most 36 tokens,
micro-batches of at most 64 rows, AdamW, one optimiser step. Ours computes plain rows: nothing is shared, and no row is
skipped (every advantage differs from 0). The generation column is for information: ours does not generate here.
Once with prompts of 30 to 40 tokens, once with prompts of 200, which ours computes once for each group.

Part 2, ours against itself with one padded row for each call, in the order of the calls, every token computed to the
end (the head sees trained positions only, in all arms), gradients compared.

Part 3, what options add to one update of the first geometry of part 2: LoRA, KL to a reference, a value head (both with
the pass that scores their column), gradient checkpointing.

Part 4, the memory of the gradient of 8,192 tokens at a vocabulary of 151,936: the peak of resident memory of a process
of its own, beside one chunk of logits plus the model's weights. The peak includes the gradient of the weights and what
the layers store; the optimiser's state is in the later update, which is printed for information.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from agentlightning.credit import training_samples
from agentlightning.models.lora import Adapters
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig, ValueHeadConfig
from agentlightning.policy.update.forward import CHUNK_LOGITS, Forward
from agentlightning.policy.update.packing import MicroBatch
from agentlightning.policy.update.updater import Updater, means
from agentlightning.policy.update.value_head import ValueHead
from agentlightning.trajectory import Node, TokenTree, TrainingSample, Trajectory, Transition

SIZES = {"0.4M": (128, 2), "3.4M": (256, 4)}
VOCAB, EOS = 512, 0
PROMPTS, GROUP, NEW_TOKENS, MICRO_BATCH, LR = 16, 8, 36, 64, 1e-4
LARGE_VOCAB = 151_936
TRL_CASES = {(30, 40): ("ours, plain rows", 1 / 2), (200, 200): ("ours, auto", 1 / 6)}
"""By the tokens of a prompt: the arm whose time is judged, and its goal as a share of TRL's."""
PARTS = ("trl", "sharing", "options", "memory", "all", "measure-memory")
INSTALL = """TRL is not there, so its part is left out. To have it, in an environment of its own:
    python -m venv ENV
    ENV/bin/pip install torch==2.13.0
    ENV/bin/pip install trl==1.16.0
    python benchmarks/train_step.py --trl-python ENV/bin/python      (or set AGL_TRL_PYTHON)"""


def build_model(hidden: int, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=256 if hidden == 128 else 720,
        num_hidden_layers=layers,
        num_attention_heads=4,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return LlamaForCausalLM(shape)


def timed(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


# -- part 1: beside TRL ----------------------------------------------------------------------------------------------


def warm_start(model: PreTrainedModel) -> None:
    """Teach the model that answers end, after 22 tokens on average; a random one would never stop."""
    draw = random.Random(0)
    updater = Updater(model, OptimizerConfig(type="muon", lr=3e-3))
    for _ in range(40):
        rows = []
        for _ in range(16):
            prompt = tuple(draw.randrange(1, VOCAB) for _ in range(10))
            answer = (*(draw.randrange(1, VOCAB) for _ in range(draw.randint(8, 36))), EOS)
            nodes = (Node(-1, prompt), Node(0, answer, True, (0.0,) * len(answer), "r", "c"))
            share = (1 / 16 / len(answer),) * len(answer)
            rows.append(TrainingSample(TokenTree(nodes), advantages=((), (1.0,) * len(answer)), weights=((), share)))
        updater.step(rows, UpdateOptions(loss="nll"))


def save_model(model: PreTrainedModel, directory: Path) -> None:
    words = {"<eos>": EOS} | {f"w{i}": i for i in range(1, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(directory)
    model.save_pretrained(directory)


def run_trl(python: str, directory: Path, steps: int, seed: int, prompt: tuple[int, int]) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    output = directory / f"trl-{seed}.jsonl"
    prompts = [" ".join(f"w{draw.randrange(1, VOCAB)}" for _ in range(draw.randint(*prompt))) for _ in range(PROMPTS)]
    job = {
        "model": str(directory / "model"),
        "scratch": str(directory / "scratch"),
        "output": str(output),
        "prompts": prompts,
        "group_size": GROUP,
        "max_new_tokens": NEW_TOKENS,
        "micro_batch": MICRO_BATCH,
        "lr": LR,
        "steps": steps,
        "seed": seed,
    }
    file = directory / "job.json"
    file.write_text(json.dumps(job))
    script = Path(__file__).with_name("train_step_trl.py")
    done = subprocess.run([python, str(script), str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the TRL arm failed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in output.read_text().splitlines()]


def as_samples(model: PreTrainedModel, step: dict[str, Any]) -> list[TrainingSample]:
    """What TRL trained on in one step, as token trees: one for each prompt, with its advantages."""
    trees: dict[tuple[int, ...], list[tuple[tuple[int, ...], float]]] = {}
    for (prompt, answer), advantage in zip(step["rows"], step["advantages"], strict=True):
        trees.setdefault(tuple(prompt), []).append((tuple(answer), advantage))
    samples = []
    for prompt, answers in trees.items():
        nodes = [Node(-1, prompt)]
        for i, (answer, _) in enumerate(answers):
            nodes.append(Node(0, answer, True, score(model, prompt, answer), f"r{i}", f"c{i}"))
        advantages = [(), *((value,) * len(answer) for answer, value in answers)]
        weights = [(), *((1 / len(step["rows"]) / len(answer),) * len(answer) for answer, _ in answers)]
        samples.append(TrainingSample(TokenTree(tuple(nodes)), advantages=advantages, weights=weights))
    return samples


@torch.no_grad()
def score(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities an engine would have recorded while sampling."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return tuple(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())


def our_step(updater: Updater, samples: list[TrainingSample], sharing: str, longest: int) -> dict[str, float]:
    phases: dict[str, float] = {}
    start = time.process_time()
    batches = updater.forward.plan(samples, token_budget=MICRO_BATCH * (longest + NEW_TOKENS), sharing=sharing)
    phases["plan"] = time.process_time() - start
    phases["forward and backward"] = timed(lambda: updater.accumulate(batches))
    phases["clip and step"] = timed(updater.optimizer.step)
    return {**phases, "tokens": float(sum(batch.tokens for batch in batches))}


def optimisation(phases: dict[str, float]) -> float:
    return sum(phases.get(name, 0.0) for name in ("plan", "forward and backward", "clip and step"))


def beside_trl(size: str, python: str, rounds: int, prompt: tuple[int, int]) -> dict[str, float]:
    """The median times of our arms, as a share of TRL's. `prompt`: the least and most tokens of one."""
    model = build_model(*SIZES[size])
    warm_start(model)
    arms: dict[str, list[dict[str, float]]] = {"TRL": [], "ours, plain rows": [], "ours, auto": []}
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, Path(directory) / "model")
        updater = Updater(model, OptimizerConfig(lr=LR))
        for seed in range(rounds):
            first, *steps = run_trl(python, Path(directory), 4, seed, prompt)  # both arms warm up on the first step
            for sharing in ("merged", "auto"):
                our_step(updater, as_samples(model, first), sharing, prompt[1])
            for step in steps:
                answers = sum(len(answer) for _, answer in step["rows"])
                width = max(len(p) for p, _ in step["rows"]) + max(len(a) for _, a in step["rows"])
                arms["TRL"].append({**step["phases"], "tokens": float(width * len(step["rows"])), "answers": answers})
                samples = as_samples(model, step)
                arms["ours, plain rows"].append(our_step(updater, samples, "merged", prompt[1]))
                arms["ours, auto"].append(our_step(updater, samples, "auto", prompt[1]))
    return print_arms(f"{size}, prompts of {prompt[0]} to {prompt[1]} tokens", model, arms)


def print_arms(title: str, model: PreTrainedModel, arms: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    answers = statistics.median(step["answers"] for step in arms["TRL"])
    print(
        f"\n{title} ({model.num_parameters():,} parameters), {PROMPTS * GROUP} completions, {answers:.0f} answer tokens"
    )
    names = ("generate", "plan", "forward and backward", "clip and step")
    print(f"  {'CPU seconds, median':20}" + "".join(f"{name:>22}" for name in (*names, "optimisation", "tokens")))
    totals = {arm: statistics.median(map(optimisation, steps)) for arm, steps in arms.items()}
    for arm, steps in arms.items():
        cells = [statistics.median(step[name] for step in steps) if name in steps[0] else None for name in names]
        shown = "".join(f"{'-' if cell is None else f'{cell:.3f}':>22}" for cell in (*cells, totals[arm]))
        print(f"  {arm:20}{shown}{statistics.median(step['tokens'] for step in steps):>22.0f}")
    for arm in list(arms)[1:]:
        print(f"  {arm} / TRL, optimisation: {totals[arm] / totals['TRL']:.2f}")
    return {arm: total / totals["TRL"] for arm, total in totals.items()}


# -- part 2: shared computation --------------------------------------------------------------------------------------


def conversation(name: str, draw: random.Random, prompt: tuple[int, ...], turns: int, answer: int) -> Trajectory:
    history, calls = prompt, []
    for turn in range(turns):
        sampled = tuple(draw.randrange(VOCAB) for _ in range(answer))
        logprobs = tuple(-6.2 + draw.uniform(-0.1, 0.1) for _ in sampled)
        calls.append(Transition(name, "at", f"{name}-{turn}", turn + 1, history, sampled, logprobs))
        history += sampled + tuple(draw.randrange(VOCAB) for _ in range(30))
    return Trajectory(name, "at", tuple(calls), draw.random())


def geometry(groups: int, size: int, prompt: int, turns: int, answer: int, shared_prompt: bool) -> list[TrainingSample]:
    draw, made = random.Random(0), []
    for g in range(groups):
        common = tuple(draw.randrange(VOCAB) for _ in range(prompt))
        made.append(
            [
                conversation(
                    f"{g}.{i}",
                    draw,
                    common if shared_prompt else tuple(draw.randrange(VOCAB) for _ in range(prompt)),
                    turns,
                    answer,
                )
                for i in range(size)
            ]
        )
    return training_samples(made)[0]


CASES: dict[str, tuple[dict[str, Any], float | None]] = {
    "groups of 8, prompt 200, answers of 40": (
        {"groups": 4, "size": 8, "prompt": 200, "turns": 1, "answer": 40, "shared_prompt": True},
        0.30,
    ),
    "8-turn conversations, 100 + (40 + 30) a turn": (
        {"groups": 1, "size": 4, "prompt": 100, "turns": 8, "answer": 40, "shared_prompt": False},
        0.13,
    ),
    "both: such conversations from one prompt": (
        {"groups": 1, "size": 4, "prompt": 100, "turns": 8, "answer": 40, "shared_prompt": True},
        None,
    ),
}


def padded_rows(updater: Updater, samples: list[TrainingSample]) -> list[MicroBatch]:
    """One row for each call, 64 rows a pass, padded to the longest, in the order of the calls."""
    batches = updater.forward.plan(samples, token_budget=10**9, sharing="rows")
    lines = [line for batch in batches for line in batch.lines]
    return [MicroBatch(tuple(lines[i : i + MICRO_BATCH]), batches[0].table) for i in range(0, len(lines), MICRO_BATCH)]


def gradient(updater: Updater, batches: Iterable[MicroBatch]) -> torch.Tensor:
    updater.optimizer.zero_grad()
    updater.accumulate(list(batches))
    return torch.cat([p.grad.flatten() for p in updater.optimizer.parameters if p.grad is not None])


def shared(size: str, rounds: int, measured: dict[str, dict[str, float]]) -> list[tuple[str, bool]]:
    """The verdicts; `measured` gets the CPU seconds of each arm, by case."""
    model = build_model(*SIZES[size])
    updater, plain = Updater(model), Updater(model)
    plain.forward.last_mlp = None
    verdicts = []
    for case, (settings, target) in CASES.items():
        samples = geometry(**settings)
        arms = {
            "one padded row per call": padded_rows(updater, samples),
            "rows by length": updater.forward.plan(samples, token_budget=8192, sharing="rows"),
            "merged": updater.forward.plan(samples, token_budget=8192, sharing="merged"),
            "shared": updater.forward.plan(samples, token_budget=8192, sharing="shared"),
            "auto": updater.forward.plan(samples, token_budget=8192),
        }
        expected = gradient(plain, arms["one padded row per call"])
        apart = {a: ((gradient(updater, b) - expected).norm() / expected.norm()).item() for a, b in arms.items()}
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm, batches in arms.items():
                who = plain if arm == "one padded row per call" else updater
                seconds[arm].append(timed(lambda who=who, batches=batches: who.accumulate(batches)))
        times = {arm: statistics.median(values) for arm, values in seconds.items()}
        measured[f"{size}, {case}"] = times
        verdicts.append(print_case(f"{size}, {case}", arms, times, apart, target))
    return verdicts


def print_case(
    title: str,
    arms: dict[str, list[MicroBatch]],
    times: dict[str, float],
    apart: dict[str, float],
    target: float | None,
) -> tuple[str, bool]:
    base = times["one padded row per call"]
    print(f"\n{title}")
    print(f"  {'':26}{'tokens':>9}{'CPU seconds':>13}{'ratio':>8}{'gradient apart':>17}")
    for arm, batches in arms.items():
        tokens = sum(batch.tokens for batch in batches)
        print(f"  {arm:26}{tokens:>9}{times[arm]:>13.3f}{times[arm] / base:>8.3f}{apart[arm]:>17.1e}")
    best = min(times["merged"], times["shared"])
    limit = target * base if target else 1.1 * best  # 10%: on a busy machine equal plans differ by as much
    named = f"ratio at most {target:.2f}" if target else "auto no worse than the better of merged and shared"
    return f"{title}: {named}", times["auto"] <= limit and max(apart.values()) < 1e-5


# -- part 3: options -------------------------------------------------------------------------------------------------


def with_column(sample: TrainingSample, **columns: Any) -> TrainingSample:
    return TrainingSample(sample.tree, columns={**sample.columns, **columns})


def option_arms(size: str, samples: list[TrainingSample]) -> dict[str, Callable[[], Any]]:
    """One update with each option; each has a model of its own."""
    config = OptimizerConfig(lr=LR)
    models = {name: build_model(*SIZES[size]) for name in ("plain", "LoRA", "reference", "value", "checkpointing")}
    trees = [sample.tree for sample in samples]
    plain = Updater(models["plain"], config)
    adapters = Adapters(models["LoRA"])
    adapter = adapters.add("shared", r=16, alpha=32.0)
    lora = Updater(models["LoRA"], config, adapter)
    kl, reference = Updater(models["reference"], config), Forward(build_model(*SIZES[size]))
    head = ValueHead.of(models["value"], ValueHeadConfig())
    critic = Updater(models["value"], config, value_head=head)
    recomputing = Updater(
        models["checkpointing"], config, forward=Forward(models["checkpointing"], gradient_checkpointing=True)
    )

    def with_lora() -> None:
        with adapters.use("shared"):
            lora.step(samples)

    def with_reference() -> None:
        columns = reference.score(trees, {"logprobs"})["logprobs"]
        given = [with_column(s, ref_logprobs=c) for s, c in zip(samples, columns, strict=True)]
        kl.step(given, UpdateOptions(loss=["ppo", {"type": "kl", "coefficient": 0.01}]))

    def with_critic() -> None:
        columns = critic.forward.score(trees, {"values"}, value_head=head)["values"]
        given = [with_column(s, values=c, returns=s.advantages) for s, c in zip(samples, columns, strict=True)]
        critic.step(given, UpdateOptions(loss=["ppo", "value"]))

    return {
        "plain": lambda: plain.step(samples),
        "LoRA, r=16": with_lora,
        "reference KL": with_reference,
        "value head": with_critic,
        "gradient checkpointing": lambda: recomputing.step(samples),
    }


def options(size: str, rounds: int) -> dict[str, float]:
    """The median CPU seconds of each arm, printed with its ratio to the first."""
    settings, _ = next(iter(CASES.values()))
    arms = option_arms(size, geometry(**settings))
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds + 1):
        for arm, update in arms.items():
            seconds[arm].append(timed(update))
    times = {arm: statistics.median(values[1:]) for arm, values in seconds.items()}  # The first is a warm-up.
    print(f"\n{size}, one update with options")
    for arm, value in times.items():
        print(f"  {arm:26}{value:>10.3f} s{value / times['plain']:>8.2f}")
    return times


# -- part 4: memory --------------------------------------------------------------------------------------------------


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def answers_to_one_prompt(vocabulary: int, rows: int, tokens: int) -> TrainingSample:
    draw = random.Random(0)
    nodes, values = [Node(-1, (1, 2, 3))], [()]
    for i in range(rows):
        answer = tuple(draw.randrange(vocabulary) for _ in range(tokens))
        nodes.append(Node(0, answer, True, (-10.0,) * tokens, f"r{i}", f"c{i}"))
        values.append(((-1.0) ** i / rows / tokens,) * tokens)
    return TrainingSample(TokenTree(tuple(nodes)), advantages=values, weights=[[abs(v) for v in own] for own in values])


MEMORY_ARMS: dict[str, tuple[int, bool]] = {
    "one pass": (8192 + 256, False),
    "one pass, gradient checkpointing": (8192 + 256, True),
    "micro-batches of 2,048 tokens": (2048, False),
}
"""Token budget, gradient checkpointing."""


def measure_memory(arm: str) -> None:
    """Print bytes of memory and the tokens trained, as JSON. Runs in a process of its own."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
    token_budget, recomputes = MEMORY_ARMS[arm]

    def updater(vocabulary: int) -> Updater:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **shape))
        return Updater(model, forward=Forward(model, gradient_checkpointing=recomputes))

    def peak_of(work: Callable[[], Any]) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # Forgets the peak so far.
        work()
        return status("VmHWM") - before

    updater(512).step([answers_to_one_prompt(512, 2, 8)])  # Loads what torch loads late.
    before = status("VmRSS")
    learner = updater(LARGE_VOCAB)
    samples = [answers_to_one_prompt(LARGE_VOCAB, 64, 128)]
    batches = learner.forward.plan(samples, token_budget=token_budget)
    sums: dict[str, float] = {}
    found = {"peak": peak_of(lambda: sums.update(means(learner.accumulate(batches))))}
    found["weights"] = found["gradient"] = sum(p.numel() * p.element_size() for p in learner.model.parameters())
    found["again"] = peak_of(lambda: learner.accumulate(batches))
    learner.optimizer.step()
    found["update"] = peak_of(lambda: learner.step(samples, UpdateOptions(token_budget=token_budget)))
    states = learner.optimizer.state_dict()["optimizers"]
    tensors = [v for each in states for kept in each["state"].values() for v in kept.values() if hasattr(v, "numel")]
    found["optimiser"] = sum(v.numel() * v.element_size() for v in tensors)
    print(json.dumps({**found, "tokens": sums["tokens_trained"]}))


def memory() -> list[tuple[str, bool]]:
    verdicts: list[tuple[str, bool]] = []
    for arm in MEMORY_ARMS:
        command = [sys.executable, __file__, "--part", "measure-memory", "--memory-arm", arm]
        # glibc keeps freed blocks below this size: the peak would depend on what earlier passes left behind.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        verdicts.append(print_memory(arm, json.loads(done.stdout.splitlines()[-1])))
    return verdicts


def print_memory(arm: str, found: dict[str, float]) -> tuple[str, bool]:
    chunk = CHUNK_LOGITS * 4
    held = found["weights"] + chunk
    whole = held + found["gradient"] + found["optimiser"]
    print(f"\ngradient of {found['tokens']:.0f} tokens at a vocabulary of {LARGE_VOCAB:,}, {arm}")
    rows = {
        "weights": found["weights"],
        "chunk of logits": chunk,
        "gradient of the weights": found["gradient"],
        "optimiser state": found["optimiser"],
        "peak": found["peak"],
        "peak of a second pass": found["again"],
        "peak of a later update": found["update"],
    }
    for name, size in rows.items():
        print(f"  {name:26}{size / 2**20:>8.0f} MiB")
    print(f"  all logits at once would be {found['tokens'] * LARGE_VOCAB * 4 / 2**20:,.0f} MiB")
    print(f"  later update / (weights + chunk): {found['update'] / held:.2f}")
    print(f"  later update / (weights + chunk + gradient + optimiser state): {found['update'] / whole:.2f}")
    ratio = max(found["peak"], found["again"]) / held
    return f"{arm}: peak memory at most 2.0 of a chunk plus the weights: {ratio:.2f}", ratio <= 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=os.environ.get("AGL_TRL_PYTHON"), help="python of TRL's environment")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of every measurement")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--part", choices=PARTS, default="all", help="what to measure")
    parser.add_argument("--memory-arm", choices=list(MEMORY_ARMS), default="one pass", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if arguments.part == "measure-memory":
        measure_memory(arguments.memory_arm)
        return 0
    verdicts: list[tuple[str, bool]] = []
    measured: dict[str, dict[str, float]] = {}
    if arguments.part not in ("trl", "all"):
        pass
    elif arguments.trl_python and Path(arguments.trl_python).exists():
        for size in arguments.sizes:
            for prompt, (arm, target) in TRL_CASES.items():
                ratio = beside_trl(size, arguments.trl_python, arguments.rounds, prompt)[arm]
                text = f"{size}, prompts of at most {prompt[1]}: {arm} at most {target:.3f} of TRL's time: {ratio:.3f}"
                verdicts.append((text, ratio <= target))
    else:
        print(INSTALL)
    for size in arguments.sizes if arguments.part in ("sharing", "all") else ():
        verdicts += shared(size, arguments.rounds, measured)
    for size in arguments.sizes if arguments.part in ("options", "all") else ():
        measured[f"{size}, options"] = options(size, arguments.rounds)
    if arguments.part in ("memory", "all"):
        verdicts += memory()
    print()
    for text, met in verdicts:
        print(f"{'met   ' if met else 'MISSED'}  {text}")
    if arguments.json:
        print(json.dumps({"title": "train step", "seconds": measured, "verdicts": verdicts}))
    return int(arguments.check and not all(met for _, met in verdicts))


if __name__ == "__main__":
    sys.exit(main())
