"""GGUF, the model files of llama.cpp and Ollama: converted to a checkpoint of transformers, and written from one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentlightning.errors import MissingExtraError, PolicyError
from agentlightning.models import OUTPUT_HEAD, Precision, checkpoint

# -- layout ----------------------------------------------------------------------------------------------------------

# What reading and writing GGUF have in common: how a tokenizer divides text, and how positions are scaled.

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""How Llama 3.1 and later scale positions, but for the factor."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(numbers: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CONTRACTIONS + numbers + REST), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
PRE_TOKENIZERS: dict[str, Any] = {
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
    "gpt-2": _GPT2,
    "deepseek-r1-qwen": _split(r"\p{N}"),
}
"""How the words of a byte-level tokenizer are found, by the name that llama.cpp has for it."""


def rope_factors(config: Any) -> torch.Tensor:
    """What the frequency of each pair of dimensions is divided by, as `rope_freqs.weight` of a GGUF file has it."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    even = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32)
    return config.rope_parameters["rope_theta"] ** (-even / (2 * len(scaled))) / scaled


# -- reading ---------------------------------------------------------------------------------------------------------

# Converts a GGUF file to a checkpoint that transformers loads, with weights in float32.
#
# The reader of transformers does most of it. What it would read wrongly without a word (another family of models,
# scaled positions, an unknown division of text into words) is refused here, by name.

READ_FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Values of `general.architecture` that are read."""
TOKENIZER, WORDS, TURN_END = (f"tokenizer.ggml.{name}" for name in ("model", "pre", "eot_token_id"))
OWN_HEADS = ("qwen3", "gemma2", "gemma3")
"""Families for whose width of a head the reader takes a default, whatever the file says."""
HEAD = "attention.key_length"
DAMAGED = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, NotImplementedError)
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
    checkpoint.save(target, None, model.save_pretrained, tokenizer.save_pretrained)


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents() if name in reader.fields else None


def _check(path: Path, family: Any, fields: dict[str, Any], tensors: dict[str, Any]) -> torch.Tensor | None:
    """The factors by which the file scales the frequencies of positions, if it does. Raises PolicyError for what would
    be read wrongly."""
    kind, words, scaling = fields[TOKENIZER], fields[WORDS], fields[f"{family}.rope.scaling.type"] or "none"
    scaled = [name for name in tensors if name.startswith("rope_")]
    if family not in READ_FAMILIES:
        problem = f"holds a model of the architecture {family!r}, not read from GGUF ({', '.join(READ_FAMILIES)} are)"
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
        tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[fields[WORDS]]
        tokenizer.backend_tokenizer.model.ignore_merges = fields[WORDS] == "llama-bpe"
    tokenizer.model_max_length = model.config.max_position_embeddings
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = {tokenizer.eos_token_id, fields[TURN_END]} - {None}
    model.generation_config.eos_token_id = sorted(ends)
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id


# -- writing ---------------------------------------------------------------------------------------------------------

# Writes a checkpoint as a GGUF file, which llama.cpp and Ollama load: models of the Llama and Qwen families whose
# tokenizer is a byte-level BPE. What cannot be written is refused by name. The names of tensors are those of the `gguf`
# package.

WRITTEN_FAMILIES = ("llama", "qwen2", "qwen3")
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}
"""Values of `general.file_type`."""
OTHER_WAY = "export it with --to gguf-ready for llama.cpp's own converter"


def write_gguf(source: Path, path: Path, precision: Precision) -> None:
    """Write the file, all or nothing; matrices have the precision, vectors float32. Raises PolicyError for what cannot
    be written, and MissingExtraError."""
    if find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf")
    from gguf import GGUFWriter

    config = AutoConfig.from_pretrained(source)
    if config.model_type not in WRITTEN_FAMILIES or getattr(config, "use_sliding_window", False):
        raise PolicyError(
            f"{source} holds a model of the family {config.model_type!r}, which is not written as GGUF (but"
            f" {', '.join(WRITTEN_FAMILIES)}, without a sliding window); {OTHER_WAY}"
        )
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.absolute().parent) as folder:
            writer: Any = GGUFWriter(Path(folder) / path.name, config.model_type)
            with closing(writer):
                _add_shape(writer, config, precision)
                _add_tokenizer(writer, source, config.vocab_size)
                _add_tensors(writer, source, config, precision)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            checkpoint.flush_file(Path(folder) / path.name)
            (Path(folder) / path.name).replace(path)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"cannot write {path}: {error}; free space or choose another --out") from error


def _add_shape(writer: Any, config: Any, precision: Precision) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (kind := config.rope_parameters.get("rope_type", "default")) not in ("default", "llama3"):
        raise PolicyError(f"the model scales its positions by {kind}, which is not written as GGUF; {OTHER_WAY}")
    shape = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": head,
        "value_length": head,
        "rope_dimension_count": head,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "file_type": FILE_TYPES[precision],
    }
    for name, value in shape.items():
        getattr(writer, f"add_{name}")(value)


def _add_tokenizer(writer: Any, source: Path, size: int) -> None:
    from gguf import TokenType

    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    own = _plain(tokenizer.backend_tokenizer.pre_tokenizer)
    words = next((name for name, each in PRE_TOKENIZERS.items() if own == _plain(each)), None)
    if model["type"] != "BPE" or words is None:
        raise PolicyError(
            f"the tokenizer of {source} divides text into words in a way that has no name in GGUF (but"
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
    ends = GenerationConfig.from_pretrained(source).eos_token_id
    if others := set(ends if isinstance(ends, list) else [ends]) - {None, tokenizer.eos_token_id}:
        writer.add_eot_token_id(min(others))
    begins = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    writer.add_add_bos_token(begins)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _plain(words: Any) -> bytes:
    """How a tokenizer divides text, without what changes positions alone."""
    return b"" if words is None else words.__getstate__().replace(b'"trim_offsets":false', b'"trim_offsets":true')


def _add_tensors(writer: Any, source: Path, config: Any, precision: Precision) -> None:
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
    from gguf.quants import quantize

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, value in _tensors(source):
        if name == OUTPUT_HEAD and config.tie_word_embeddings:
            continue
        if (written := names.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise PolicyError(f"{source} has weights without a name in GGUF, such as {name}; {OTHER_WAY}")
        kind = GGMLQuantizationType["F32" if value.ndim == 1 else precision.upper()]
        if precision == "q8_0" and value.ndim > 1 and value.shape[-1] % 32:
            raise PolicyError(f"{name} has rows of {value.shape[-1]} numbers, and q8_0 holds 32 at a time; use f16")
        writer.add_tensor(written, quantize(_in_order(name, value, config), kind), raw_dtype=kind)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config).numpy())


def _tensors(source: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for path in sorted(source.glob("*.safetensors")):
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
