"""Models on disk: checkpoints in the format of `transformers`, and the tiny model that is made on the spot."""

from typing import Final

INPUT_EMBEDDING: Final = "model.embed_tokens.weight"
OUTPUT_HEAD: Final = "lm_head.weight"
"""Names of the tensors that models with tied embeddings share."""
