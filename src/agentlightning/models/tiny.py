"""A policy small enough to train on one CPU core: a Llama of about 0.4M parameters and its tokenizer, made on the spot.

Nothing is downloaded. What `make_tiny` writes is an ordinary Hugging Face checkpoint: any other causal language model
with a chat template may take its place. The tokenizer is a byte-level BPE learned from the texts it is given, on top
of all 256 bytes, so every text can be written; digits are always single tokens. The chat template is ChatML with
Hermes tool calls; a system turn lists the tools as signatures, because a long JSON schema would be most of what so
small a model reads.
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

from agentlightning.models.checkpoint import without_bars

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
MARKERS = re.compile(rf"{re.escape(START)}(\w+\n)|{'|'.join(map(re.escape, (PAD, END, CALL, CALL_END)))}")
"""Where rendered text is cut into what is encoded by itself: at the special tokens, and where an answer begins."""
ROPE_THETA = 500.0
"""Lower than usual: with turns this short, positions must differ where the policy learns to copy."""
MOST_RECORDS = 2000
"""BPE learns from this many records at most, evenly spread."""

PIECES = r"\d|[^A-Za-z\d]*[A-Za-z]+(?: (?=\d))?|[^A-Za-z\d]+"
"""What BPE may merge: one digit; a word with the marks before it and a space between it and a digit; other marks."""

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
    """Write an untrained policy into `directory`: its tokenizer learned from `records`, its weights drawn from `seed`.

    A record is a text, a conversation (`{"messages": [...], "tools": [...]}`), or any JSON value, whose strings count.
    With the defaults about 0.4M parameters. `vocabulary` is the most tokens there may be; few texts need fewer."""
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
    with without_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_tokenizer(
    records: Iterable[Any], *, vocabulary: int = 1024, context_length: int = 2048
) -> PreTrainedTokenizerFast:
    """A byte-level BPE learned from `records`, with the chat template above. The same records give the same tokens."""
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
    """What BPE learns from: a conversation as the template writes it, cut at its markers; else all strings."""
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
