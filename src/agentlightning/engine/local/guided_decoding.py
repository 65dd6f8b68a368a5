"""Guided decoding: compiles JSON schemas and grammars with llguidance, and masks the tokens that would violate them.

The sampler applies the masks before it normalises, so the recorded probabilities are those of the distribution
sampled from. An answer that ends at max_tokens is valid only as far as it goes: cut JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentlightning.engine.base import ConstraintKind

logger = logging.getLogger(__name__)

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,40}"
"""Allowed between the parts of a JSON value: enough to indent it, but bounded, or a model may write nothing else."""


class Matcher:
    """State of one answer under a schema or grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def push(self, token: int) -> None:
        """Advance by the sampled token."""
        self._matcher.consume_token(token)

    def token_mask(self, vocab_size: int) -> Tensor:
        """[V], bool: the tokens that may come next. Where nothing may follow, the end-of-turn tokens."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(packed, count=vocab_size, bitorder="little").view(bool))


class GrammarCompiler:
    """Compiles schemas and grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self.compile = lru_cache(maxsize=256)(self._compile)

    def can_compile(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """Whether it can be enforced. The first call takes up to a second for a large vocabulary."""
        return self.compile(text, kind) is not None

    def matcher(self, text: str, kind: ConstraintKind = "json_schema") -> Matcher:
        """A matcher for one answer, if it `can_compile`."""
        return Matcher(self.compile(text, kind).deep_copy())

    def _compile(self, text: str, kind: ConstraintKind) -> Any:
        """An llguidance matcher in its initial state, to be copied: a thousand times cheaper than compiling again. None
        if llguidance is not installed or cannot enforce it."""
        if (tokenizer := self._guided_tokenizer) is None:
            return None
        import llguidance

        try:
            if kind == "json_schema":
                text = llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
        except ValueError:
            return None
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, tokenizer)
        # A warning names a keyword that would not be enforced.
        return None if is_error or messages else llguidance.LLMatcher(tokenizer, text, log_level=0)

    @cached_property
    def _guided_tokenizer(self) -> Any:
        """llguidance's form of the tokenizer; None: there is none."""
        try:
            import llguidance.hf
        except ImportError:
            logger.info("answers are checked but not constrained: pip install 'agentlightning[train]'")
            return None
        try:
            return llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        except ValueError as error:  # A slow tokenizer, or a kind that llguidance cannot read.
            logger.warning("answers are checked but not constrained, because the tokenizer cannot be read: %s", error)
            return None
