"""Converts a GGUF file to a checkpoint that transformers loads, with weights in float32.

The reader of transformers does most of it. What it would read wrongly without a word (another family of models, scaled
positions, an unknown division of text into words) is refused here, by name.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.errors import MissingExtraError, PolicyError
from agentlightning.models import OUTPUT_HEAD, checkpoint
from agentlightning.models.gguf.layout import LLAMA3_ROPE, PRE_TOKENIZERS, rope_factors

FAMILIES: Final = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Values of `general.architecture` that are read."""
TOKENIZER, WORDS, TURN_END = (f"tokenizer.ggml.{name}" for name in ("model", "pre", "eot_token_id"))
OWN_HEADS: Final = ("qwen3", "gemma2", "gemma3")
"""Families for whose width of a head the reader takes a default, whatever the file says."""
HEAD: Final = "attention.key_length"
DAMAGED: Final = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, NotImplementedError)
"""What the readers raise for a file that is cut short or no GGUF."""


def convert(path: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file to a new directory, all or nothing. Raises PolicyError, and
    MissingExtraError."""
    if find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf")
    from gguf import GGUFReader

    try:
        reader: Any = GGUFReader(path)
        family = _field(reader, "general.architecture")
        fields = {
            name: _field(reader, name)
            for name in (TOKENIZER, WORDS, TURN_END, f"{family}.rope.scaling.type", f"{family}.{HEAD}")
        }
        frequencies = _check(path, family, fields, {tensor.name: tensor for tensor in reader.tensors})
        head = fields[f"{family}.{HEAD}"]
        shape = {"head_dim": head} if head and family in OWN_HEADS else {}
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with checkpoint.without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True, **shape
            )
        model, found = loaded
    except DAMAGED as error:
        raise PolicyError(
            f"{path} cannot be read as a GGUF file ({type(error).__name__}: {error}); it is cut short or damaged: fetch"
            " it again"
        ) from error
    missing = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])} - {OUTPUT_HEAD}
    if missing:
        raise PolicyError(f"{path} lacks {len(missing)} weights of its model, such as {min(missing)}; fetch it again")
    if frequencies is not None:
        _set_frequencies(path, model.config, frequencies)
    model.hf_quantizer.remove_quantization_config(model)
    _set_tokens(model, tokenizer, fields)
    checkpoint.save(target, model, tokenizer, None)


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents() if name in reader.fields else None


def _check(path: Path, family: Any, fields: dict[str, Any], tensors: dict[str, Any]) -> torch.Tensor | None:
    """The factors by which the file scales the frequencies of positions, if it does. Raises PolicyError for what would
    be read wrongly."""
    kind, words, scaling = fields[TOKENIZER], fields[WORDS], fields[f"{family}.rope.scaling.type"] or "none"
    scaled = [name for name in tensors if name.startswith("rope_")]
    if family not in FAMILIES:
        problem = f"holds a model of the architecture {family!r}, not read from GGUF ({', '.join(FAMILIES)} are)"
    elif (words not in PRE_TOKENIZERS) if kind == "gpt2" else kind != "llama":
        problem = f"has a tokenizer ({kind}, {words}) that transformers would read wrongly"
    elif scaling != "none" or scaled not in ([], ["rope_freqs.weight"]):
        problem = f"scales its positions ({', '.join(scaled) or scaling}), which is not read from GGUF"
    else:
        return torch.from_numpy(tensors[scaled[0]].data.copy()) if scaled else None
    raise PolicyError(f"{path} {problem}; give its checkpoint for transformers")


def _set_frequencies(path: Path, config: Any, frequencies: torch.Tensor) -> None:
    """Llama 3.1's scaling, which a GGUF file holds as one factor for each frequency."""
    scaled = {**config.rope_parameters, **LLAMA3_ROPE, "factor": float(frequencies.max())}
    config.rope_parameters = scaled
    if not torch.allclose(rope_factors(config), frequencies, rtol=1e-3):
        raise PolicyError(
            f"{path} scales its positions otherwise than Llama 3.1, which is not read from GGUF; give its checkpoint"
            " for transformers"
        )


def _set_tokens(model: Any, tokenizer: Any, fields: dict[str, Any]) -> None:
    """The words of a tokenizer, and the tokens that end and fill a turn."""
    if fields[TOKENIZER] == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[fields[WORDS]]()
        tokenizer.backend_tokenizer.model.ignore_merges = fields[WORDS] == "llama-bpe"
    tokenizer.model_max_length = model.config.max_position_embeddings
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = {tokenizer.eos_token_id, fields[TURN_END]} - {None}
    model.generation_config.eos_token_id = sorted(ends)
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
