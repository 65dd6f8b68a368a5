"""One answer while servers draw it, possibly one after another: what one of them drew is the next one's prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agentlightning.engine.base import FinishReason, Sample, SamplingParams
from agentlightning.engine.local.stop_strings import StopScanner
from agentlightning.engine.servers.base import Ask, End, Run, Top


class UnknownWeightsError(Exception):
    """A server drew with weights that nobody gave it."""


class Stopped(Exception):
    """A stop string is complete that no server alone could see."""


class Drawing:
    """What has been drawn of one answer. `decode` turns tokens into text, for stop strings across servers."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        room: int,
        end_tokens: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        on_tokens: Callable[..., None] | None,
    ) -> None:
        self.prompt = list(prompt)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Top] = []
        self.versions: list[int] = []
        """One for each token."""
        self._params = params
        self._room = room
        self._end_tokens = end_tokens
        self._decode = decode
        self._on_tokens = on_tokens
        self._part = 0
        """Tokens that were there before the present server began."""
        self._scanner: StopScanner | None = None

    @property
    def watched(self) -> bool:
        """Whether tokens are shown as they come."""
        return self._on_tokens is not None

    @property
    def reason(self) -> FinishReason | None:
        """Why nothing is left to draw, whatever a server says."""
        if self.token_ids and self.token_ids[-1] in self._end_tokens:
            return "stop"
        return "length" if len(self.token_ids) >= self._room else None

    @property
    def goes_on(self) -> bool:
        """Whether another server would draw what is left from the same distribution: penalties count tokens drawn,
        a schema or grammar begins with the first of them, and those of another server are its prompt."""
        params = self._params
        counts = params.presence_penalty or params.frequency_penalty or params.constraint is not None
        return not self.token_ids or not counts

    def ask(self, model: str, adapter: bool) -> Ask:
        """For what is left."""
        self._part = count = len(self.token_ids)
        params = self._params
        if count:
            # The same seed again would repeat the numbers that the first tokens were drawn with.
            params = params if params.seed is None else replace(params, seed=params.seed + count)
            params = replace(params, min_tokens=max(0, params.min_tokens - count))
            self._scanner = self._scan() if params.stop else None
        prompt = [*self.prompt, *self.token_ids] if count else self.prompt
        return Ask(model, prompt, params, self._room - count, self._end_tokens, adapter)

    def receive(self, run: Run, version: int) -> None:
        """Raises Stopped where the answer has come to its end."""
        run, stopped = self._cut(run)
        self.token_ids += run.token_ids
        self.logprobs += run.logprobs
        self.top_logprobs += run.top_logprobs
        self.versions += [version] * len(run.token_ids)
        if self._on_tokens is not None and run.token_ids:
            told = (run.logprobs, run.top_logprobs) if self._params.stream_logprobs else ()
            self._on_tokens(run.token_ids, *told)
        if stopped:
            raise Stopped

    def learn(self, end: End, known: Mapping[str, int]) -> None:
        """Take the server's own word for which weights drew what. Raises UnknownWeightsError."""
        if not end.weights:
            return
        labels = [label for label, count in end.weights for _ in range(count)][: len(self.token_ids) - self._part]
        if unknown := [label for label in labels if label not in known]:
            raise UnknownWeightsError(unknown[0])
        self.versions[self._part : self._part + len(labels)] = [known[label] for label in labels]

    def take_back(self) -> bool:
        """Drop what the present server drew; False where it has been shown already."""
        if self.watched and len(self.token_ids) > self._part:
            return False
        for kept in (self.token_ids, self.logprobs, self.top_logprobs, self.versions):
            del kept[self._part :]
        return True

    def sample(self, reason: FinishReason, version: int) -> Sample:
        spans: list[tuple[int, int]] = []
        for drawn_by in self.versions:
            count = spans.pop()[1] if spans and spans[-1][0] == drawn_by else 0
            spans.append((drawn_by, count + 1))
        return Sample(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            policy_version=spans[-1][0] if spans else version,
            versions=tuple(spans) if len(spans) > 1 else (),
            top_logprobs=tuple(self.top_logprobs),
        )

    def _scan(self) -> StopScanner:
        scanner = StopScanner(self._params.stop, self._decode)
        for token in self.token_ids:
            scanner.push(token)
        return scanner

    def _cut(self, run: Run) -> tuple[Run, bool]:
        if self._scanner is None:
            return run, False
        for index, token in enumerate(run.token_ids, start=1):
            if self._scanner.push(token):
                return Run(run.token_ids[:index], run.logprobs[:index], run.top_logprobs[:index]), True
        return run, False
