"""A tiny byte-level BPE tokenizer with ChatML and Hermes tool calls, trained in a fraction of a second. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from agentlightning.errors import MissingExtraError

CHATML: Final = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

_TEXT: Final = """system user assistant tool You are a helpful calculator. What is the answer? The answer is
<tool_call> {"name": "calculator", "arguments": {"expression": "6 * 7"}} </tool_call> hello world, good morning"""


def tiny_tokenizer(
    chat_template: str | None = CHATML,
    vocab_size: int = 384,
    *,
    special: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    eos: str = "<|endoftext|>",
) -> Any:
    """A `PreTrainedTokenizerFast` for any text, with enough merges that text can be tokenized in many ways.

    `special` are the special tokens of the template besides `eos`; see `tests.support.templates`."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingExtraError("transformers", "train") from error
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_TEXT] * 4, trainer)
    extra: list[Any] = list(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, extra_special_tokens=extra)
    tokenizer.chat_template = chat_template
    return tokenizer
