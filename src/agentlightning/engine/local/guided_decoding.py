"""Which tokens may come next in an answer that is held to a schema or grammar: llguidance, over a model's tokenizer.

Responsible for compiling them and for following one answer token by token. Called by whoever draws: `allowed` gives
a mask over the vocabulary, applied before probabilities are taken, so that what is recorded are the probabilities of
the distribution drawn from. It never draws, and it holds an answer to its form only as far as it is drawn: one cut at
max_tokens is cut JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from agentlightning.engine.base import ConstraintKind
from agentlightning.errors import ConfigError

logger = logging.getLogger(__name__)

WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,40}"
"""Between the parts of a JSON value: enough to indent it, and no more, or a model may write nothing but that."""


class Matcher:
    """One answer under a schema or grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def push(self, token: int) -> None:
        """Go on with the token that was drawn."""
        self._matcher.consume_token(token)

    def allowed(self, vocabulary: int) -> Tensor:
        """[V], bool: the tokens that may come next. Where nothing may follow, those that end the turn."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        known = bits.flatten()[:vocabulary].bool()
        allowed[: len(known)] = known
        return allowed


class Grammars:
    """Compiles schemas and grammars for one tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = sorted(eos_token_ids)
        self._lock = Lock()
        self._known: Any = None
        """The tokenizer as llguidance has it; False: it cannot be had."""
        self.compile = lru_cache(maxsize=256)(self._compile)

    def knows(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """Whether answers can be held to it. The first call takes up to a second, for large vocabularies."""
        return self.compile(text, kind) is not None

    def matcher(self, text: str, kind: ConstraintKind = "json_schema") -> Matcher:
        """For one answer. Raises ConfigError for what `knows` says no to."""
        compiled = self.compile(text, kind)
        if compiled is None:
            raise ConfigError(f"answers cannot be held to this {kind}; leave it out, and check them")
        return Matcher(compiled.deep_copy())

    def _compile(self, text: str, kind: ConstraintKind) -> Any:
        """At its beginning, to be copied: that is a thousand times cheaper than to compile it anew. None where
        llguidance is not there, or cannot hold answers to it."""
        if not (tokenizer := self._open()):
            return None
        import llguidance

        try:
            if kind == "json_schema":
                text = llguidance.LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
        except ValueError:
            return None
        wrong, said = llguidance.LLMatcher.validate_grammar_with_warnings(text, tokenizer)
        # A warning tells of a keyword that would not be held to.
        return None if wrong or said else llguidance.LLMatcher(tokenizer, text, log_level=0)

    def _open(self) -> Any:
        with self._lock:
            if self._known is None:
                self._known = _guided(self._tokenizer, self._vocabulary, self._eos) or False
        return self._known


def _guided(tokenizer: Any, vocabulary: int, eos_token_ids: list[int]) -> Any:
    try:
        import llguidance.hf
    except ImportError:
        logger.info("answers are only checked, not held: pip install 'agentlightning[train]'")
        return None
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos_token_ids)
    except ValueError as error:  # A tokenizer without a fast form, or of a kind it does not read.
        logger.warning("answers are only checked, not held: the tokenizer cannot be read: %s", error)
        return None


def allowed(matchers: Sequence[Matcher | None], vocabulary: int, device: torch.device) -> Tensor | None:
    """[N, V], bool: the tokens that may come next in each row; None where every row is free."""
    if not any(matchers):
        return None
    free = torch.ones(vocabulary, dtype=torch.bool)
    rows = [free if matcher is None else matcher.allowed(vocabulary) for matcher in matchers]
    return torch.stack(rows).to(device)
