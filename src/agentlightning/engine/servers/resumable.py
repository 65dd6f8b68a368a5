"""One answer sampled by servers, possibly one after another: a server continues from the tokens of the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agentlightning.engine.base import FinishReason, OnTokens, Sample, SamplingParams, TopLogprobs, version_runs
from agentlightning.engine.servers.clients.http import Completion, SampleRequest, TokenChunk
from agentlightning.engine.stop_strings import StopScanner


class UnknownWeightsError(Exception):
    """A server sampled with weights that it was never given."""


class StopStringFound(Exception):
    """The answer contains a stop string that spans two servers, so that neither could see it."""


class ResumableSample:
    """The tokens of one answer so far. `decode` turns tokens into text, for stop strings across servers."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        end_tokens: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        on_tokens: OnTokens | None,
    ) -> None:
        self.prompt = list(prompt)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.versions: list[int] = []
        """One for each token."""
        self._params = params
        self._max_tokens = max_tokens
        self._end_tokens = end_tokens
        self._decode = decode
        self._on_tokens = on_tokens
        self._start = 0
        """Number of tokens from earlier servers."""
        self._scanner: StopScanner | None = None

    @property
    def streamed(self) -> bool:
        """Whether tokens are passed on as they arrive."""
        return self._on_tokens is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set when the answer is complete, whatever a server reports."""
        if self.token_ids and self.token_ids[-1] in self._end_tokens:
            return "stop"
        return "length" if len(self.token_ids) >= self._max_tokens else None

    @property
    def can_resume(self) -> bool:
        """Whether another server would sample the rest from the same distribution. Penalties count sampled tokens, and
        a schema or grammar begins with the first of them, but the other server sees them as its prompt."""
        params = self._params
        stateful = params.presence_penalty or params.frequency_penalty or params.constraint is not None
        return not self.token_ids or not stateful

    def request(self, model: str, adapter: bool) -> SampleRequest:
        """A request for the rest of the answer."""
        self._start = count = len(self.token_ids)
        params = self._params
        if count:
            # The same seed would repeat the random numbers of the first tokens.
            params = params if params.seed is None else replace(params, seed=params.seed + count)
            params = replace(params, min_tokens=max(0, params.min_tokens - count))
            self._scanner = self._new_scanner() if params.stop else None
        prompt = [*self.prompt, *self.token_ids]
        return SampleRequest(model, prompt, params, self._max_tokens - count, self._end_tokens, adapter)

    def append(self, chunk: TokenChunk, version: int) -> None:
        """Raises StopStringFound if the answer is complete."""
        chunk, stopped = self._cut_at_stop_string(chunk)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top_logprobs += chunk.top_logprobs
        self.versions += [version] * len(chunk.token_ids)
        if self._on_tokens is not None and chunk.token_ids:
            logprobs = (chunk.logprobs, chunk.top_logprobs) if self._params.stream_logprobs else ()
            self._on_tokens(chunk.token_ids, *logprobs)
        if stopped:
            raise StopStringFound

    def set_versions(self, completion: Completion, versions: Mapping[str, int]) -> None:
        """Apply the server's report of which weights sampled which tokens; `versions` maps labels. Raises
        UnknownWeightsError."""
        if not completion.weights:
            return
        count = len(self.token_ids) - self._start
        labels = [label for label, tokens in completion.weights for _ in range(tokens)][:count]
        if unknown := [label for label in labels if label not in versions]:
            raise UnknownWeightsError(unknown[0])
        self.versions[self._start : self._start + len(labels)] = [versions[label] for label in labels]

    def rollback(self) -> bool:
        """Drop the tokens of the current server; False if they have been streamed already."""
        if self.streamed and len(self.token_ids) > self._start:
            return False
        for values in (self.token_ids, self.logprobs, self.top_logprobs, self.versions):
            del values[self._start :]
        return True

    def sample(self, finish_reason: FinishReason, version: int) -> Sample:
        return Sample(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            policy_version=self.versions[-1] if self.versions else version,
            versions=version_runs(self.versions),
            top_logprobs=tuple(self.top_logprobs),
        )

    def _new_scanner(self) -> StopScanner:
        scanner = StopScanner(self._params.stop, self._decode)
        for token in self.token_ids:
            scanner.push(token)
        return scanner

    def _cut_at_stop_string(self, chunk: TokenChunk) -> tuple[TokenChunk, bool]:
        if self._scanner is None:
            return chunk, False
        for end, token in enumerate(chunk.token_ids, start=1):
            if self._scanner.push(token):
                return TokenChunk(chunk.token_ids[:end], chunk.logprobs[:end], chunk.top_logprobs[:end]), True
        return chunk, False
