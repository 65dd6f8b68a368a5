"""Versions of weights on any URL that fsspec knows: full Hugging Face directories, and differences between them."""
