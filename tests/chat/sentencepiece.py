"""Tiny tokenizers of SentencePiece's kinds, which write a space before a text, and templates of models with one."""

from __future__ import annotations

import string
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = ["The capital of France is Paris", "Hello there, hello you", "[INST] what is it? [/INST]", "<|user|>\nhi"]
TEMPLATES = {
    "llama-2": "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}",
    "mistral": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}
KINDS = ("normalizer", "first", "always")
"""normalizer: Llama 2's, before every text between markers; first: legacy=False; always: Metaspace's default."""


@cache
def sentencepiece(kind: str, template: str) -> Any:
    """A tokenizer of a kind with a template."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if kind == "normalizer":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind)
        bpe.decoder = decoders.Metaspace("▁", prepend_scheme=kind)
    alphabet = [*string.printable, "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_TEXTS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def own_tokens(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """The tokens of the template's own text."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return tokenizer.encode(text, add_special_tokens=False)
