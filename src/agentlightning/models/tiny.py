"""A model small enough to train on one CPU core: a Llama of about 0.4M parameters with random weights.

Nothing is downloaded. `make_tiny` writes an ordinary Hugging Face checkpoint; any other causal language model with a
chat template can replace it. The tokenizer is a byte-level BPE trained on the given texts, so it can encode any text;
digits are always single tokens. The chat template is ChatML with Hermes tool calls; a system turn lists the tools as
signatures, because JSON schemas would fill most of the context of so small a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.models.checkpoint import without_progress_bars

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
MARKERS = re.compile(rf"{re.escape(START)}(\w+\n)|{'|'.join(map(re.escape, (PAD, END, CALL, CALL_END)))}")
"""Where rendered text is divided before BPE is trained on it: at special tokens, and where an answer begins."""
ROPE_THETA = 500.0
"""Lower than usual: turns are short, and copying from them needs positions that differ clearly."""
MOST_RECORDS = 2000
"""The most records that BPE is trained on, evenly spread."""

PIECES = r"\d|[^A-Za-z\d]*[A-Za-z]+(?: (?=\d))?|[^A-Za-z\d]+"
"""What BPE may merge: a single digit; a word with preceding punctuation, and a space if a digit follows; other
punctuation."""

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set system = messages and messages[0].role == 'system' -%}
{%- if system or tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if system -%}{{- text(messages[0].content) -}}{%- endif -%}
{%- if tools -%}
{{- ('\\n' if system else '') ~ 'Tools:' -}}
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{- ' ' ~ function.name ~ '(' ~ ((function.parameters or {}).properties or {}) | join(', ') ~ ')' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if system else messages) -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- ('\\n' if message.content or not loop.first else '') ~ '<tool_call>\\n{"name": ' ~ function.name | tojson -}}
{{- ', "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make_tiny(
    directory: Path | str,
    records: Iterable[Any],
    *,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    vocabulary: int = 1024,
    context_length: int = 2048,
) -> Path:
    """Write an untrained model to `directory`, with a tokenizer trained on `records` and random weights of `seed`.

    A record is a text, a conversation (`{"messages": [...], "tools": [...]}`), or any JSON value, whose strings are
    used. The defaults give about 0.4M parameters. `vocabulary` is the most tokens; few texts need fewer."""
    directory = Path(directory)
    tokenizer = make_tokenizer(records, vocabulary=vocabulary, context_length=context_length)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=context_length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with without_progress_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_tokenizer(
    records: Iterable[Any], *, vocabulary: int = 1024, context_length: int = 2048
) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `records`, with the chat template above. The same records give the same tokens."""
    known = list(records)
    texts = [text for record in known[:: -(-len(known) // MOST_RECORDS) or 1] for text in _texts(record)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[PAD, START, END],
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(CALL, normalized=False), AddedToken(CALL_END, normalized=False)])
    return _wrapped(core, context_length)


def _wrapped(core: Tokenizer, context_length: int = 2048) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@cache
def _renderer() -> PreTrainedTokenizerFast:
    return _wrapped(Tokenizer(models.BPE()))


def _texts(record: Any) -> Iterator[str]:
    """The texts to train BPE on: a conversation as the template renders it, divided at markers; else all strings."""
    match record:
        case str():
            yield record
        case {"messages": list(messages)}:
            text = _renderer().apply_chat_template(messages, tools=record.get("tools"), tokenize=False)
            yield from filter(None, MARKERS.split(cast(str, text)))
        case dict():
            yield from (text for value in cast("dict[str, Any]", record).values() for text in _texts(value))
        case list():
            yield from (text for value in cast("list[Any]", record) for text in _texts(value))
        case _:
            pass
