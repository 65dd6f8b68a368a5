"""Writes a checkpoint as a GGUF file, which llama.cpp and Ollama load: models of the Llama and Qwen families whose
tokenizer is a byte-level BPE. What cannot be written is refused by name. The names of tensors are those of the `gguf`
package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from agentlightning.errors import MissingExtraError, PolicyError
from agentlightning.models import OUTPUT_HEAD, Precision
from agentlightning.models.gguf.layout import PRE_TOKENIZERS, rope_factors

FAMILIES: Final = ("llama", "qwen2", "qwen3")
FILE_TYPES: Final = {"f32": 0, "f16": 1, "q8_0": 7}
"""Values of `general.file_type`."""
OTHER_WAY: Final = "export it with --to gguf-ready for llama.cpp's own converter"


def write_gguf(checkpoint: Path, path: Path, precision: Precision) -> None:
    """Write the file, all or nothing; matrices have the precision, vectors float32. Raises PolicyError for what cannot
    be written, and MissingExtraError."""
    if find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf")
    from gguf import GGUFWriter

    config = AutoConfig.from_pretrained(checkpoint)
    if config.model_type not in FAMILIES or getattr(config, "use_sliding_window", False):
        raise PolicyError(
            f"{checkpoint} holds a model of the family {config.model_type!r}, which is not written as GGUF (but"
            f" {', '.join(FAMILIES)}, without a sliding window); {OTHER_WAY}"
        )
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.absolute().parent) as folder:
            writer: Any = GGUFWriter(Path(folder) / path.name, config.model_type)
            with closing(writer):
                _add_shape(writer, config, precision)
                _add_tokenizer(writer, checkpoint, config.vocab_size)
                _add_tensors(writer, checkpoint, config, precision)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            with (Path(folder) / path.name).open("rb") as file:
                os.fsync(file.fileno())
            (Path(folder) / path.name).replace(path)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"cannot write {path}: {error}; free space or choose another --out") from error


def _add_shape(writer: Any, config: Any, precision: Precision) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (kind := config.rope_parameters.get("rope_type", "default")) not in ("default", "llama3"):
        raise PolicyError(f"the model scales its positions by {kind}, which is not written as GGUF; {OTHER_WAY}")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(FILE_TYPES[precision])


def _add_tokenizer(writer: Any, checkpoint: Path, size: int) -> None:
    from gguf import TokenType

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    own = _plain(tokenizer.backend_tokenizer.pre_tokenizer)
    words = next((name for name, make in PRE_TOKENIZERS.items() if own == _plain(make())), None)
    if model["type"] != "BPE" or words is None:
        raise PolicyError(
            f"the tokenizer of {checkpoint} divides text into words in a way that has no name in GGUF (but"
            f" {', '.join(PRE_TOKENIZERS)}); {OTHER_WAY}"
        )
    added = tokenizer.added_tokens_decoder
    tokens = [tokenizer.convert_ids_to_tokens(number) for number in range(min(len(tokenizer), size))]
    kinds = [
        TokenType.NORMAL if each not in added else TokenType.CONTROL if added[each].special else TokenType.USER_DEFINED
        for each in range(len(tokens))
    ]
    unused = range(len(tokens), size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list([*tokens, *(f"[PAD{number}]" for number in unused)])
    writer.add_token_types([*kinds, *(TokenType.UNUSED for _ in unused)])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    ends = GenerationConfig.from_pretrained(checkpoint).eos_token_id
    if others := set(ends if isinstance(ends, list) else [ends]) - {None, tokenizer.eos_token_id}:
        writer.add_eot_token_id(min(others))
    begins = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    writer.add_add_bos_token(begins)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _plain(words: Any) -> bytes:
    """How a tokenizer divides text, without what changes positions alone."""
    return b"" if words is None else words.__getstate__().replace(b'"trim_offsets":false', b'"trim_offsets":true')


def _add_tensors(writer: Any, checkpoint: Path, config: Any, precision: Precision) -> None:
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
    from gguf.quants import quantize

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, value in _tensors(checkpoint):
        if name == OUTPUT_HEAD and config.tie_word_embeddings:
            continue
        if (written := names.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise PolicyError(f"{checkpoint} has weights without a name in GGUF, such as {name}; {OTHER_WAY}")
        kind = GGMLQuantizationType["F32" if value.ndim == 1 else precision.upper()]
        if precision == "q8_0" and value.ndim > 1 and value.shape[-1] % 32:
            raise PolicyError(f"{name} has rows of {value.shape[-1]} numbers, and q8_0 holds 32 at a time; use f16")
        writer.add_tensor(written, quantize(_in_order(name, value, config), kind), raw_dtype=kind)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config).numpy())


def _tensors(checkpoint: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name).float().numpy()


def _in_order(name: str, value: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """llama.cpp rotates neighbouring dimensions of a Llama's queries and keys, transformers both halves of a head."""
    part = name.split(".")[-2]
    if config.model_type != "llama" or part not in ("q_proj", "k_proj"):
        return value
    heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
