"""What a model can hold, read from its configuration without loading its weights."""

from __future__ import annotations

from pathlib import Path

from agentlightning.errors import PolicyError


def model_limits(model: str | Path) -> tuple[int | None, int]:
    """(ids of tokens are smaller than this, tokens of prompt and answer together). Raises PolicyError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(model)).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise PolicyError(f"model={model} has no configuration that transformers reads: {error}") from error
    return getattr(config, "vocab_size", None), int(getattr(config, "max_position_embeddings", None) or 1 << 20)
