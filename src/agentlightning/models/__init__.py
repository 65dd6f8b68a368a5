"""Models on disk: checkpoints in the format of `transformers`, and the tiny model that is made on the spot."""

from typing import Literal

Precision = Literal["f32", "f16", "q8_0"]
"""How the numbers of a matrix are kept in a GGUF file."""
INPUT_EMBEDDING = "model.embed_tokens.weight"
OUTPUT_HEAD = "lm_head.weight"
"""Names of the tensors that models with tied embeddings share."""
SHARED = "shared"
"""The name of the adapter of the policy itself."""
