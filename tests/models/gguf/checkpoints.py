"""Small checkpoints with random weights whose tokenizers GGUF has a name for. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from agentlightning.models.gguf import PRE_TOKENIZERS

TEXTS = ["What is 12 + 30?", "Tom's 3 apples; he buys 456 more.", "def f(x):\n\treturn 'ünï'  # 你好", "it'll I'LL"] * 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda size: LlamaConfig(vocab_size=size, tie_word_embeddings=True, **SHAPE),
    "llama 3": lambda size: LlamaConfig(vocab_size=size, tie_word_embeddings=False, rope_parameters=LLAMA3, **SHAPE),
    "qwen2": lambda size: Qwen2Config(vocab_size=size + 5, tie_word_embeddings=True, **SHAPE),
    "qwen3": lambda size: Qwen3Config(vocab_size=size, tie_word_embeddings=False, head_dim=32, **SHAPE),
}


def small_tokenizer(words: str = "smollm", template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = PRE_TOKENIZERS[words]
    core.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=sorted(ByteLevel.alphabet()), special_tokens=marks, show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=marks[2], bos_token=marks[1], unk_token=marks[0], pad_token=marks[0]
    )
    tokenizer.chat_template = template
    return tokenizer


def small_checkpoint(
    directory: Path, family: str = "llama", words: str = "smollm", template: str = TEMPLATE, seed: int = 0
) -> Path:
    tokenizer = small_tokenizer(words, template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[family](len(tokenizer)), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # Tensors that were swapped would otherwise be equal.
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
