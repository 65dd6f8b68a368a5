"""One sampling request of the local engine: its tokens, its progress and what ends it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from agentlightning.engine.base import FinishReason, SamplingParams, TopLogprobs
from agentlightning.engine.local.guided_decoding import Matcher
from agentlightning.engine.stop_strings import StopScanner
from agentlightning.errors import AgentLightningError
from agentlightning.util.kept_sets import KeptSets


@dataclass(slots=True, eq=False)
class Request:
    """One answer while it is sampled."""

    tokens: list[int]
    """The prompt, then every sampled token."""
    prompt_length: int
    max_length: int
    """Limit of prompt and answer together."""
    params: SamplingParams
    rng: random.Random
    """The request's own generator, so that its tokens do not depend on the other rows of the batch."""
    adapter: str | None = None
    """The adapter that samples it; None: the model's own weights."""
    logprobs: list[float] = field(default_factory=list[float])
    """One for each sampled token."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    """One for each sampled token, if requested."""
    kept: list[bytes] | None = None
    """For each sampled token the ids (int32) that top_k and top_p kept, empty where that is all; None: not recorded."""
    finish_reason: FinishReason | None = None
    error: AgentLightningError | None = None
    """Why no further token can be sampled."""
    policy_version: int = 0
    """Version of the weights that sampled the last token."""
    version_changes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(version, number of tokens sampled by then) for each weight update during the answer."""
    cancelled: bool = False
    cached: int = 0
    """Number of leading tokens whose keys and values are in the request's slot."""
    prefix_hashes: list[bytes] = field(default_factory=list[bytes])
    """Of the prompt; see `cascade_attention.hash_prefixes`."""
    deferred_once: bool = False
    """It has already waited once for another request's prefill."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    stop_scanner: StopScanner | None = None
    matcher: Matcher | None = None
    """State of the schema or grammar that constrains the answer."""

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def kept_sets(self) -> KeptSets | None:
        """See `Sample.kept_sets`."""
        return None if self.kept is None else KeptSets.joined(self.kept)

    @property
    def below_min_tokens(self) -> bool:
        """Whether `min_tokens` forbids the answer to end yet. A constrained answer ends where its grammar says."""
        return self.matcher is None and len(self.logprobs) < self.params.min_tokens

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """See `Sample.versions`."""
        runs: list[tuple[int, int]] = []
        start = 0
        for version, end in (*self.version_changes, (self.policy_version, len(self.logprobs))):
            if runs and runs[-1][0] == version:
                version, count = runs.pop()
                start -= count
            if end > start:
                runs.append((version, end - start))
            start = end
        return tuple(runs) if len(runs) > 1 else ()

    @property
    def prefill_remaining(self) -> int:
        """Number of tokens left to prefill. The last token is computed by the step that samples the next one."""
        return len(self.tokens) - 1 - self.cached
