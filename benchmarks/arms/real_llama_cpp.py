"""llama.cpp for `real_model.py`, by llama-cpp-python's low-level interface: all callers are sequences of one context.

A prompt that several callers share is computed once and its cells are shared (`llama_memory_seq_cp`), as llama.cpp's
own `batched` example does. A context is made before each measurement, as a server has one from the start. The file is
in float32; for bfloat16 llama.cpp writes one in BF16 beside it.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import llama_cpp as lib

sys.path.insert(0, str(Path(__file__).parent))
from line import measured, serve

BATCH = 2048
STATE: dict[str, Any] = {}


def load(model: str, dtype: str, threads: int, context: int) -> dict[str, Any]:
    lib.llama_backend_init()
    silent = lib.llama_log_callback(lambda *_: None)
    STATE["log"] = silent  # ctypes does not keep it
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    path = Path(model)
    if dtype == "bfloat16":
        path = path.with_suffix(".bf16.gguf")
        if not path.exists():
            wanted = lib.llama_model_quantize_default_params()
            wanted.ftype = lib.LLAMA_FTYPE_MOSTLY_BF16
            if lib.llama_model_quantize(model.encode(), str(path).encode(), ctypes.byref(wanted)):
                raise RuntimeError(f"llama.cpp cannot write {path}")
    STATE["model"] = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    STATE["vocabulary"] = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(STATE["model"]))
    STATE["threads"] = threads
    return {}


def new_context(prompts: list[list[int]], new: int) -> Any:
    params = lib.llama_context_default_params()
    distinct = {tuple(prompt) for prompt in prompts}
    params.n_ctx = sum(map(len, distinct)) + (new + 1) * len(prompts) + 256
    params.n_batch, params.n_ubatch = BATCH, 512
    params.n_seq_max = len(prompts)
    params.kv_unified = len(distinct) < len(prompts)  # its own advice: only where sequences share a long prefix
    if not params.kv_unified:
        params.n_ctx = (max(map(len, prompts)) + new + 64) * len(prompts)
    params.n_threads = params.n_threads_batch = STATE["threads"]
    params.offload_kqv, params.no_perf = False, True
    return lib.llama_init_from_model(STATE["model"], params)


def sample(prompts: list[list[int]], new: int) -> dict[str, Any]:
    context = new_context(prompts, new)
    batch = lib.llama_batch_init(BATCH, 0, 1)
    samplers = []
    for seed in range(len(prompts)):
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
        samplers.append(chain)
    try:
        return measured(lambda: {"tokens": answer(context, batch, samplers, prompts, new)})
    finally:
        for chain in samplers:
            lib.llama_sampler_free(chain)
        lib.llama_batch_free(batch)
        lib.llama_free(context)


def put(batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
    """(token, position, sequence, whether its logits are wanted)."""
    batch.n_tokens = len(entries)
    for index, (token, position, sequence, wanted) in enumerate(entries):
        batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence


def decode(context: Any, batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
    put(batch, entries)
    if status := lib.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {status}")


def answer(context: Any, batch: Any, samplers: list[Any], prompts: list[list[int]], new: int) -> int:
    memory, sharing = lib.llama_get_memory(context), dict[tuple[int, ...], list[int]]()
    for sequence, prompt in enumerate(prompts):
        sharing.setdefault(tuple(prompt), []).append(sequence)
    latest = [0] * len(prompts)
    waiting: list[tuple[int, int, int, bool]] = []
    owners: list[tuple[int, list[int]]] = []

    def flush() -> None:
        decode(context, batch, waiting)
        for index, sequences in owners:
            for sequence in sequences:
                if sequence != sequences[0]:
                    lib.llama_memory_seq_cp(memory, sequences[0], sequence, -1, -1)
                latest[sequence] = lib.llama_sampler_sample(samplers[sequence], context, index)
        waiting.clear()
        owners.clear()

    for prompt, sequences in sharing.items():
        for position, token in enumerate(prompt):
            waiting.append((token, position, sequences[0], position == len(prompt) - 1))
            if position == len(prompt) - 1:
                owners.append((len(waiting) - 1, sequences))
            if len(waiting) == BATCH:
                flush()
    if waiting:
        flush()
    made = [1] * len(prompts)
    for step in range(new - 1):
        decode(context, batch, [(latest[s], len(prompt) + step, s, True) for s, prompt in enumerate(prompts)])
        for sequence, chain in enumerate(samplers):
            latest[sequence] = lib.llama_sampler_sample(chain, context, sequence)
            made[sequence] += 1
    return sum(made)


if __name__ == "__main__":
    serve([load, sample])
