"""The zoo: a tiny model of every causal architecture of the installed transformers, against transformers itself.

`python -m tests.models.zoo [ARCHITECTURE ...]` prints a table, one row for each key of MODEL_FOR_CAUSAL_LM_MAPPING:

    engine    answers sampled in one batch of mixed lengths have the log-probabilities that a plain forward pass gives
    score     `LocalPolicy.score` gives them too, for a group whose calls share a prompt
    gradient  one update changes the weights as a plain backward pass and the same optimiser step do
    lora      an adapter that was trained and saved gives the same logits where peft loads it

A cell is `equal`, `refused: why` (a typed error at opening), or `DIFFERS: ...`, which the test does not accept.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.support.models import model_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.errors import AgentLightningError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import Node, TokenTree, TrainingSample

CONTEXT = 512
WINDOW = 16
LENGTHS = (3, 9, 40, 90)
"""Tokens of the prompts of one batch; the longest is several windows long."""
COLUMNS = ("engine", "score", "gradient", "lora")
EQUAL = "equal"
MOST_WEIGHTS = 20_000_000
LIMIT = 2e-3
"""Largest difference of log-probabilities, in float32 and with weights that are scaled up."""

SHAPE: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "model_dim", "hidden_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size", "ffn_dim", "d_ff", "inner_dim"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "n_ctx"), CONTEXT),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("sliding_window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("head_dim", "global_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim", "rotary_dim", "rope_head_dim"), 8),
    **dict.fromkeys(("embedding_size", "output_embedding_size", "input_embedding_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "o_lora_rank", "gate_rank"), 16),
    "index_n_heads": 2,
    "index_topk": 8,
    "index_block_size": 8,
    "index_topk_blocks": 2,
    "hidden_size_per_layer_input": 8,
    "max_2d_position_embeddings": 16,
    "pad_token_id": 0,
}
"""By the names that configurations use: what is set where a configuration has the attribute."""

ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
NOT_TEXT = "no causal model of text"
MLA: Mapping[str, Any] = {"num_key_value_heads": 4, "head_dim": None, "qk_head_dim": 16}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), MLA),
    **dict.fromkeys(("longcat_flash", "minicpm3", "sarvam_mla", "youtu"), MLA),
    **{name: {"bos_token_id": 1} for name in ("cwm", "emu3", "mllama", "modernbert-decoder")},
    "falcon": {"head_dim": None},
    "falcon-alibi": {"head_dim": None, "alibi": True},
    "mixtral-router-logits": {"output_router_logits": True},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    **{n: {"rope_parameters": ROPE, "head_dim": 8} for n in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 32)},
    "deepseek_v2": {**MLA, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""What else these need."""
VARIANTS: Mapping[str, str] = {"falcon-alibi": "falcon", "mixtral-router-logits": "mixtral"}
"""Settings with which an architecture computes otherwise: name of the row -> architecture."""


KNOWN: Mapping[tuple[str, str], str] = {
    ("laguna", "lora"): "peft reads the names of its shared experts by a pattern that matches them twice"
}
"""What differs for a reason outside of this project."""
ARCHITECTURES = sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


@dataclass(slots=True)
class Row:
    architecture: str
    cells: dict[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return " | ".join([self.architecture.ljust(26), *(self.cells.get(name, "-") for name in COLUMNS)])


def tiny(architecture: str) -> PreTrainedModel:
    """A new model of this kind. Raises whatever transformers raises where these shapes do not fit."""
    kind = CONFIG_MAPPING[VARIANTS.get(architecture, architecture)]
    tokenizer = model_tokenizer()
    config = kind()
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "vocab_size": len(tokenizer)}
    wanted = {**SHAPE, **special, **OVERRIDES.get(architecture, {})}
    text = config.get_text_config(decoder=True)
    set_here = OVERRIDES.get(architecture, {})
    shape = {n: value for n, value in wanted.items() if n in set_here or getattr(text, n, None) is not None}
    shape = {name: value for name, value in shape.items() if value is not None or name not in SHAPE}
    for name in ("is_decoder",):
        if hasattr(text, name):
            shape[name] = True
    own = type(text)(**shape)
    if text is not config:
        raise TypeError(NOT_TEXT + ": it has parts for other media, and its language model is listed by itself")
    with torch.device("meta"):
        if (weights := AutoModelForCausalLM.from_config(own).num_parameters()) > MOST_WEIGHTS:
            raise TypeError(f"{weights:,} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(own)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
                elif not parameter.any():
                    parameter.normal_(std=0.1)
    return model.eval()


def check(architecture: str, directory: Path) -> Row:
    row = Row(architecture)
    try:
        model = tiny(architecture)
        model.save_pretrained(directory)
        model_tokenizer().save_pretrained(directory)
        reference = AutoModelForCausalLM.from_pretrained(directory).eval()
        with torch.inference_mode():
            reference(input_ids=torch.arange(5, 25)[None], use_cache=False)
    except Exception as error:
        row.cells = dict.fromkeys(COLUMNS, "not tiny") | {"engine": f"not tiny: {_short(error)}"}
        return row
    samples: list[Sample] = []
    for name, run in (
        ("engine", lambda: engine(directory, reference, samples)),
        ("score", lambda: score(directory, reference, samples)),
        ("gradient", lambda: gradient(directory, samples)),
        ("lora", lambda: lora(directory)),
    ):
        try:
            row.cells[name] = asyncio.run(run())
        except Refused as error:
            row.cells[name] = f"refused: {error}"
        except Exception as error:
            row.cells[name] = f"RAISES {_short(error)}"
    return row


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"


def prompts() -> list[list[int]]:
    return [[5 + (7 * n + n * n // 3 + length) % 250 for n in range(length)] for length in LENGTHS]


class Refused(Exception):
    """A typed error when the model is opened, before any call."""


def open_policy(directory: Path, **settings: Any) -> LocalPolicy:
    try:
        return LocalPolicy.open(LocalPolicyConfig.model_validate({"model": directory, "device": "cpu", **settings}))
    except AgentLightningError as error:
        raise Refused(str(error).replace(str(directory), "MODEL")) from error


@torch.inference_mode()
def plain(model: PreTrainedModel, prompt: list[int], answer: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of the answer by one forward pass without a cache."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def compare(pairs: list[tuple[torch.Tensor, torch.Tensor]], limit: float = LIMIT) -> str:
    worst = max((a - b).abs().max().item() for a, b in pairs)
    return EQUAL if worst < limit else f"DIFFERS by {worst:.1e}"


async def engine(directory: Path, reference: PreTrainedModel, samples: list[Sample]) -> str:
    policy = open_policy(directory)
    try:
        params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
        samples += await asyncio.gather(*(policy.sample(prompt, params) for prompt in prompts()))
    finally:
        await policy.close()
    return compare(
        [
            (plain(reference, prompt, sample.token_ids), torch.tensor(sample.logprobs))
            for prompt, sample in zip(prompts(), samples, strict=True)
        ]
    )


def group() -> tuple[TokenTree, list[int], list[tuple[int, ...]]]:
    """A group of three answers to one prompt."""
    prompt = prompts()[2]
    answers = [tuple(5 + (11 * n + 31 * k) % 200 for n in range(6 + k)) for k in range(3)]
    nodes = [Node(-1, tuple(prompt))]
    nodes += [Node(0, each, True, (-1.0,) * len(each), "ro", f"call{k}") for k, each in enumerate(answers)]
    return TokenTree(tuple(nodes)), prompt, answers


async def score(directory: Path, reference: PreTrainedModel, samples: list[Sample]) -> str:
    tree, prompt, answers = group()
    policy = open_policy(directory)
    try:
        found = (await policy.score([tree], {"logprobs"}))["logprobs"][0]
    finally:
        await policy.close()
    return compare([(plain(reference, prompt, each), torch.tensor(found[k + 1])) for k, each in enumerate(answers)])


async def gradient(directory: Path, samples: list[Sample]) -> str:
    tree, prompt, answers = group()
    count = sum(map(len, answers))
    weights = tuple((1.0 / count,) * len(node.token_ids) if node.sampled else () for node in tree.nodes)
    policy = open_policy(directory, optimizer=OptimizerConfig(lr=1e-3))
    try:
        grads: dict[str, torch.Tensor] = {}
        with recorded_gradients(policy, grads):
            await policy.train(
                [TrainingSample(tree, columns={"weights": weights}, share=1.0)], UpdateOptions(loss="nll")
            )
    finally:
        await policy.close()
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    loss = torch.zeros(())
    for each in answers:
        ids = torch.tensor([[*prompt, *each]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        loss = loss - logits.log_softmax(-1).gather(1, torch.tensor(each)[:, None]).sum() / count
    loss.backward()
    own = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    scale = max(g.abs().max().item() for g in own.values())
    pairs = [(own[name] / scale, grads.get(name, torch.zeros_like(own[name])) / scale) for name in own]
    return compare(pairs, 1e-3)


@contextmanager
def recorded_gradients(policy: LocalPolicy, grads: dict[str, torch.Tensor]) -> Generator[None]:
    """Within, an update notes its gradients in place of a step of its optimiser."""
    updater = policy._learner.updaters[policy._learner.own]

    def step(loss: float, norm: Any = None) -> dict[str, float]:
        grads.update({n: p.grad.clone() for n, p in policy._model.named_parameters() if p.grad is not None})
        return {"optimizer_steps": 0.0, "skipped_steps": 0.0, "grad_norm": float(norm), "lr": 0.0}

    with mock.patch.object(updater.optimizer, "step", step):
        yield


async def lora(directory: Path) -> str:
    tree, prompt, answers = group()
    saved = directory / "adapter"
    policy = open_policy(directory, lora=Lora(r=4))
    try:
        adapters = policy._learner.adapters
        assert adapters is not None
        with torch.no_grad():
            for number, up in enumerate(adapters.by_name["shared"].up):
                up.normal_(std=0.2, generator=torch.Generator().manual_seed(number))
        before = (await policy.score([tree], {"ref_logprobs"}))["ref_logprobs"][0]
        found = (await policy.score([tree], {"logprobs"}))["logprobs"][0]
        sampled = await policy.sample(prompt, SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
        await policy.save_adapter("shared", saved)
    finally:
        await policy.close()
    opened = open_policy(saved)
    try:
        again = (await opened.score([tree], {"logprobs"}))["logprobs"][0]
    finally:
        await opened.close()
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), saved).eval()
    if all(torch.allclose(torch.tensor(before[k]), torch.tensor(found[k]), atol=1e-2) for k in (1, 2, 3)):
        return "DIFFERS: the adapter changes nothing"
    pairs = [(plain(model, prompt, each), torch.tensor(found[k + 1])) for k, each in enumerate(answers)]
    pairs += [(torch.tensor(found[k]), torch.tensor(again[k])) for k in (1, 2, 3)]
    pairs.append((plain(model, prompt, sampled.token_ids), torch.tensor(sampled.logprobs)))
    return compare(pairs)


def main(architectures: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(" | ".join(["architecture".ljust(26), *COLUMNS]), flush=True)  # noqa: T201
    for architecture in architectures or ARCHITECTURES:
        with tempfile.TemporaryDirectory(prefix="agl-zoo-") as directory:
            print(check(architecture, Path(directory)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
