"""Continuous batching in this process over one transformers model: scheduler, KV cache, prefix cache and sampler."""
