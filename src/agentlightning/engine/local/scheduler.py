"""Continuous batching over one transformers causal language model: requests join and leave between any two steps.

A step prefills waiting requests (all but the last token of each, up to a token budget), then samples one token for
every ready row. Prefill never samples, so tokens come from a single place. A prefix that several requests share is
computed once, through the prefix cache, which stores the keys and values of prefilled and finished requests. Each
request may name an adapter; requests of different adapters share a forward pass, and no key or value.

Not thread-safe: the owner of a `ContinuousBatcher` calls it from one thread. It calls `invalidate_cache` before the
weights change, because every cached key and value belongs to the old weights. Running requests may stay: their tokens
are prefilled again with the new weights, like those of any preempted request. Keeping the old keys and values would
save that prefill, and record log-probabilities that no weights give.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.base import (
    DISTRIBUTION_PARAMS,
    TERMINATION_PARAMS,
    FinishReason,
    PromptTokensError,
    Sample,
    SamplingParams,
    StopScanner,
    TopLogprobs,
    room_for_answer,
    version_runs,
)
from agentlightning.engine.local import cascade_attention, decoder, kv_cache, sampler
from agentlightning.engine.local.guided_decoding import GrammarCompiler, Matcher
from agentlightning.engine.local.kv_cache import KVCache, Match, RadixPrefixCache, probe_layout
from agentlightning.errors import AgentLightningError, ConfigError, PolicyError
from agentlightning.models.checkpoint import FORWARD_ERRORS, cache_argument, configured_window
from agentlightning.models.lora import Adapters
from agentlightning.util.common_prefix import common_prefix_length
from agentlightning.util.kept_sets import KeptSets

# -- request ---------------------------------------------------------------------------------------------------------

# One sampling request of the local engine: its tokens, its progress and what ends it.


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
    token_versions: list[int] = field(default_factory=list[int])
    """For each sampled token, the version of the weights that sampled it."""
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
    def versions(self) -> tuple[tuple[int, int], ...]:
        """See `Sample.versions`."""
        return version_runs(self.token_versions)

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.token_versions[-1] if self.token_versions else 0

    @property
    def prefill_remaining(self) -> int:
        """Number of tokens left to prefill. The last token is computed by the step that samples the next one."""
        return len(self.tokens) - 1 - self.cached

    def to_sample(self) -> Sample:
        """The answer, once it is finished."""
        assert self.finish_reason is not None
        return Sample(
            token_ids=tuple(self.sampled),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            policy_version=self.policy_version,
            versions=self.versions,
            top_logprobs=tuple(self.top_logprobs),
            kept_sets=None if self.kept is None else KeptSets.joined(self.kept),
        )


logger = logging.getLogger(__name__)

GROWTH_TOKENS = 256
"""Room reserved ahead for an answer, so that the slots are seldom reallocated while it grows."""
MIN_DEFERRAL_GAIN = 16
"""A request waits for another's prefill if that saves it at least this many tokens."""
IDLE_PREFILL_FACTOR = 4
"""Multiplies a step's prefill budget while no row is ready, since nobody is then delayed."""
MAX_PADDING_RATIO = 1.3
"""Rows are prefilled together while padding enlarges the forward pass by at most this factor."""
PROBED = 12
"""Tokens of a row by which a model is tried, beside those of its shortest window."""
MOST_PADDED = 8192
"""Positions read in that trial: windows up to this size are found."""
AGREEMENT = 3e-4
"""Largest difference of logits, as a share of their spread, that is rounding in float32."""
BFLOAT16_ROUNDING = 0.05
"""Largest difference between two orders of the same operations in bfloat16 that is taken for rounding."""
MOST_ROUNDING = 0.2
"""The same in bfloat16, where it varies."""
THREAD_TRIALS = 4
"""Steps with each number of threads before one is chosen."""
MIN_SPEEDUP = 1.4
"""Several threads are used where they make a step this many times as fast. Below, they mostly wait for one another."""
BROKEN_WEIGHTS = (
    "its weights no longer hold finite numbers; go back to an earlier checkpoint and lower the learning rate"
)


class StepThreads:
    """Whether a decoding step on the CPU uses all of torch's threads or one: a step of few rows is hundreds of products
    that are too small to divide. Both are tried with the first steps of each size, in powers of two."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], dict[int, list[float]]] = {}

    @contextmanager
    def use(self, rows: int, tokens: int) -> Generator[None]:
        """Around a step of so many rows, the longest of which has so many tokens."""
        most = torch.get_num_threads()
        if most == 1:
            yield
            return
        trials = self._seconds.setdefault((rows.bit_length(), tokens.bit_length()), {most: [], 1: []})
        threads = min(trials, key=lambda each: len(trials[each]))
        tried = len(trials[threads]) == THREAD_TRIALS
        if tried:
            threads = most if min(trials[most]) * MIN_SPEEDUP < min(trials[1]) else 1
        torch.set_num_threads(threads)
        start = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(most)
        if not tried:
            trials[threads].append(time.perf_counter() - start)


@dataclass(eq=False, repr=False)
class ContinuousBatcher:
    """Samples answers from `model` for many requests at once."""

    model: PreTrainedModel
    _: KW_ONLY
    eos_token_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    context_length: int
    max_batch_size: int = 128
    kv_cache_bytes: int = 4 << 30
    """Bounds the active rows; further requests wait."""
    prefix_cache_bytes: int = 1 << 30
    """Bounds the prefix cache."""
    prefill_tokens: int = 2048
    """How many prompt tokens a step computes before the other rows get their next token."""
    seed: int = 0
    grammars: GrammarCompiler | None = None
    """None: no answer can be constrained."""
    adapters: Adapters | None = None
    max_kept_tokens: int = 1024
    """Bounds the sets of tokens that answers record."""

    def __post_init__(self) -> None:
        self.policy_version = 0
        """Version of the weights, set by whoever changes them."""
        self.adapter_versions: dict[str | None, int] = {}
        """Those of adapters, likewise; an adapter without one has that of the weights."""
        self.prefix_cache = RadixPrefixCache(self.prefix_cache_bytes)
        self._vocab_size = kv_cache.vocab_size(self.model)
        self._rng = random.Random(self.seed)
        """Seeds the requests that have no seed."""
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        """In slots from `_prefill_slot` on, shortest first."""
        self._prefill_slot = 0
        self._rows: list[Request] = []
        """Ready to sample, in slots from 0 on."""
        self._batch_params: sampler.BatchSamplingParams | None = None
        """Parameters of `_rows`; None after `_rows` changed."""
        self._shared_prefix: cascade_attention.SharedPrefix | None = None
        """Common prefixes of `_rows`, found together with `_batch_params`."""
        self._threads = StepThreads() if self.model.device.type == "cpu" else None
        self.kv_cache_usage = 0.0
        """The share of the memory for keys and values that the rows need, as of the last step."""
        self._use_cascade = False
        self._decoder: decoder.Decoder | None = None
        """Makes the forward passes in place of the model. None: the model does."""
        self._alone = False
        """Each row has a forward pass of its own, in which the model makes its mask and positions itself."""
        self.model.eval()
        self._cache_argument = cache_argument(self.model)
        layout = probe_layout(self.model)
        slots, limit = self.max_batch_size, self.kv_cache_bytes
        self._cache = KVCache(layout, self.model.device, max_slots=slots, limit_bytes=limit)
        self._choose_passes()

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self._rows or self._prefilling or self._waiting)

    def validate(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises ContextLengthError, ConfigError or PolicyError for a request that cannot be served."""
        sampler.validate(params, self._vocab_size)
        if (constraint := params.constraint) is not None:
            kind, text = constraint
            if self.grammars is None or not self.grammars.can_compile(text, kind):
                raise ConfigError(f"this {kind} cannot be enforced here; leave it out, and check the answers")
        room_for_answer(prompt, self.context_length)
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise PromptTokensError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}, the model knows 0 to "
                f"{self._vocab_size - 1}; encode it with this model's own tokenizer"
            )

    def submit(self, prompt: Sequence[int], params: SamplingParams, adapter: str | None = None) -> Request:
        """Queue a request for an adapter, or for the model's own weights. Raises as `validate` does."""
        self.validate(prompt, params)
        constraint = params.constraint
        request = Request(
            tokens=list(prompt),
            prompt_length=len(prompt),
            max_length=len(prompt) + room_for_answer(prompt, self.context_length, params.max_tokens),
            params=params,
            prefix_hashes=cascade_attention.hash_prefixes(prompt[:-1], adapter) if self._use_cascade else [],
            adapter=adapter,
            end_tokens=params.end_tokens(self.eos_token_ids),
            stop_scanner=StopScanner(params.stop, self.decode) if params.stop else None,
            matcher=self.grammars.matcher(constraint[1], constraint[0]) if self.grammars and constraint else None,
            kept=[] if params.record_kept and params.truncates and self.max_kept_tokens else None,
            rng=random.Random(self._rng.getrandbits(64) if params.seed is None else params.seed),
        )
        self._waiting.append(request)
        return request

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """Stop sampling for `request` and free its row at once."""
        request.cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
        self._free_rows([request] if request in self._rows else [])
        while self._prefilling and self._prefilling[-1].cancelled:
            self._prefilling.pop()

    def version_of(self, adapter: str | None) -> int:
        return self.adapter_versions.get(adapter, self.policy_version)

    def check_idle(self, in_flight: bool) -> None:
        """Raises PolicyError for requests in flight that may not be."""
        if not self.idle and not in_flight:
            raise PolicyError(
                "requests are in flight; wait for them before the weights change, or change them with in_flight=True"
            )

    def invalidate_cache(self, *, in_flight: bool = False, adapters: Collection[str | None] | None = None) -> None:
        """Drop every cached key and value, or those of some adapters; call it before each update of their weights. With
        `in_flight`, running requests are preempted and resume after the update; otherwise there may be none
        (PolicyError)."""
        self.check_idle(in_flight)
        self._preempt([*self._rows, *self._prefilling])
        self._rows, self._prefilling = [], []
        self.prefix_cache.clear(adapters)
        self._batch_params = self._shared_prefix = None
        if self._decoder is not None:
            self._decoder.invalidate()

    def release_memory(self) -> None:
        """Free the memory of the slots unless one is in use; the next request allocates it again."""
        if not (self._rows or self._prefilling):
            self._cache.release()

    def abort(self) -> None:
        """Drop all requests and everything cached."""
        self._rows, self._prefilling, self._batch_params = [], [], None
        self._waiting.clear()
        self.invalidate_cache()
        self.release_memory()

    def state_dict(self) -> dict[str, Any]:
        """The random state."""
        return {"random": self._rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rng.setstate(state["random"])

    # -- a step ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Sample one token for each ready row; returns these requests. A finished one has its `finish_reason` or its
        `error` set. Raises PolicyError where the model's output is a distribution for no row."""
        if self.model.training:
            self.model.eval()
        self._prefill()
        sampled = self._sample() if self._rows else []
        longest = max((len(row.tokens) for row in (*self._rows, *self._prefilling)), default=0)
        self.kv_cache_usage = self._cache.usage(self._slots_in_use, longest)
        return sampled

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Admit and prefill until the budget is used up or nothing can be admitted."""
        budget = self.prefill_tokens * (1 if self._rows else IDLE_PREFILL_FACTOR)
        while budget > 0:
            chunk = min(budget, self.prefill_tokens)
            if not self._prefilling:
                self._admit(chunk)
            if not self._prefilling:
                return
            budget -= self._prefill_chunk(chunk)

    def _admit(self, budget: int) -> None:
        """Admit waiting requests within memory and budget. Those with nothing to prefill are ready at once."""
        admitted: list[tuple[Request, Match]] = []
        deferred: list[Request] = []
        to_prefill, longest = 0, max((len(row.tokens) for row in self._rows), default=0)
        while self._waiting and to_prefill < budget:
            request = self._waiting[0]
            longest = max(longest, len(request.tokens))
            if not self._cache.fits(len(self._rows) + len(admitted) + 1, longest):
                break
            self._waiting.popleft()
            match = self.prefix_cache.match(request.tokens[:-1], request.adapter)
            if self._should_defer(request, match, admitted):
                deferred.append(request)
                continue
            admitted.append((request, match))
            to_prefill += len(request.tokens) - 1 - match.length
        self._waiting.extendleft(reversed(deferred))
        if admitted:
            self._assign_slots(admitted)

    def _should_defer(self, request: Request, match: Match, admitted: list[tuple[Request, Match]]) -> bool:
        """Whether a request about to be prefilled shares clearly more with this one than the cache does."""
        if request.deferred_once or self.prefix_cache.limit_bytes <= 0:
            return False
        needed = match.length + MIN_DEFERRAL_GAIN
        if len(request.tokens) <= needed:
            return False
        request.deferred_once = any(
            other.adapter == request.adapter and common_prefix_length(other.tokens[:-1], request.tokens) >= needed
            for other, _ in admitted
        )
        return request.deferred_once

    def _assign_slots(self, admitted: list[tuple[Request, Match]]) -> None:
        """Give each request a slot filled with its cached keys and values, the ready ones first."""
        admitted.sort(key=lambda pair: len(pair[0].tokens) - pair[1].length)
        requests = [request for request, _ in admitted]
        self._reserve_slots(self._rows + requests)
        for slot, (request, match) in enumerate(admitted, start=len(self._rows)):
            for node, count in match.nodes:
                self._cache.write(slot, request.cached, node.segment, count)
                request.cached += count
        ready = [request for request in requests if not request.prefill_remaining]
        self._rows += ready
        self._prefill_slot = len(self._rows)
        self._prefilling = requests[len(ready) :]
        self._batch_params = None

    def _reserve_slots(self, requests: list[Request]) -> None:
        """Reserve slots for `requests`, with room for their answers to grow if memory allows."""
        longest = max(len(request.tokens) for request in requests)
        with_growth = max(min(request.max_length, len(request.tokens) + GROWTH_TOKENS) for request in requests)
        if not self._rows and self._cache.capacity > 4 * with_growth:
            self._cache.release()
        self._cache.reserve(len(requests), longest, len(self._rows), ahead=with_growth - longest)

    def _prefill_chunk(self, budget: int) -> int:
        """One forward pass over the first prefilling rows; returns the number of tokens it computed."""
        rows = self._next_prefill_batch()
        width = min(rows[-1].prefill_remaining, max(1, budget // len(rows)))
        pasts = [request.cached for request in rows]
        self._cache.reserve(self._slots_in_use, max(pasts) + width, self._slots_in_use)
        self._forward(
            [request.adapter for request in rows],
            [self._padded_chunk(request, width) for request in rows],
            self._prefill_slot,
            pasts,
        )
        for request in rows:
            request.cached += min(width, request.prefill_remaining)
        self._promote([request for request in rows if not request.prefill_remaining])
        return width * len(rows)

    @property
    def _slots_in_use(self) -> int:
        return self._prefill_slot + len(self._prefilling) if self._prefilling else len(self._rows)

    def _next_prefill_batch(self) -> list[Request]:
        """The rows to compute together: the shortest ones, while padding them to one width wastes little."""
        rows, total = [self._prefilling[0]], self._prefilling[0].prefill_remaining
        for request in self._prefilling[1:]:
            total += request.prefill_remaining
            if request.prefill_remaining * (len(rows) + 1) > MAX_PADDING_RATIO * total:
                break
            rows.append(request)
        return rows

    @staticmethod
    def _padded_chunk(request: Request, width: int) -> list[int]:
        """The next `width` tokens to prefill, padded with a token whose keys and values are overwritten later."""
        end = min(request.cached + width, len(request.tokens) - 1)
        tokens = request.tokens[request.cached : end]
        return tokens + tokens[-1:] * (width - len(tokens))

    def _promote(self, prefilled: list[Request]) -> None:
        """Move prefilled rows, the first of the prefilling ones, to the ready rows, and cache their prompts."""
        for request in prefilled:
            slot = self._prefill_slot
            self._prefill_slot += 1
            self._prefilling.pop(0)
            if request.cancelled:
                continue
            if slot != len(self._rows):
                self._cache.move(slot, len(self._rows), request.cached)
            self._rows.append(request)
            self._cache_prefix(request, len(self._rows) - 1)
        self._batch_params = None

    # -- sampling --------------------------------------------------------------------------------------------------

    def _sample(self) -> list[Request]:
        self._ensure_capacity()
        rows = list(self._rows)
        if self._batch_params is None:
            self._batch_params = sampler.batch_params([request.params for request in rows], self.model.device)
            self._shared_prefix = self._find_shared_prefix()
        tokens, pasts = [row.tokens[-1:] for row in rows], [row.cached for row in rows]
        with self._threads.use(len(rows), max(pasts)) if self._threads else nullcontext():
            logits = self._decode_step([row.adapter for row in rows], tokens, pasts)
            uniform = torch.tensor([row.rng.random() for row in rows], dtype=torch.float64, device=logits.device)
            adjusted = rows if self._batch_params.adjusted else []
            sampled = sampler.sample_tokens(
                logits,
                self._batch_params,
                uniform,
                [row.sampled for row in adjusted],
                _allowed_tokens(rows, logits),
                [row.tokens for row in adjusted],
            )
        # One transfer for both: float64 represents token ids and float32 log-probabilities exactly.
        pairs = torch.stack([sampled.tokens.double(), sampled.logprobs.double()]).tolist()
        if not all(map(math.isfinite, pairs[1])):
            self._mark_failed(rows, logits, pairs[1])
        for request, token, logprob in zip(rows, *pairs, strict=True):
            if request.error is None:
                self._append_token(request, int(token), logprob)
        _record_top_logprobs(rows, sampled)
        if sampled.kept is not None:
            recording = [rows[index] for index in self._batch_params.recording]
            _record_kept(recording, sampled.kept, self.max_kept_tokens)
        self._free_rows([request for request in rows if request.done])
        return rows

    def _find_shared_prefix(self) -> cascade_attention.SharedPrefix | None:
        """The prefixes that rows share, with their keys and values; reuses those of the last step if they still fit."""
        layout = self._cache.layout
        if not self._use_cascade or layout.has_sliding_window or any(row.prefill_remaining for row in self._rows):
            return None
        groups = cascade_attention.find_groups(
            [request.prefix_hashes for request in self._rows],
            [request.cached for request in self._rows],
            layout.bytes_per_token // len(layout.locations),
        )
        if groups is None:
            return None
        previous = self._shared_prefix
        if previous is not None and (previous.groups.hashes, previous.groups.length) == (groups.hashes, groups.length):
            layers = previous.layers
        else:
            layers = self._cache.gather([rows[0] for rows in groups.rows], groups.length)
        return cascade_attention.SharedPrefix(groups, layers, *cascade_attention.index_rows(groups, self.model.device))

    def _mark_failed(self, rows: list[Request], logits: Tensor, logprobs: list[float]) -> None:
        """Give an error to each request whose next token has no distribution. Raises PolicyError where the model itself
        gives none to any row."""
        broken = (logits.isnan().any(-1) | logits.isinf().all(-1)).tolist()
        if all(broken):
            raise PolicyError(f"the model gave no next token a probability: {BROKEN_WEIGHTS}")
        for index, (request, logprob) in enumerate(zip(rows, logprobs, strict=True)):
            if broken[index]:
                adapter = "" if request.adapter is None else f" with the adapter {request.adapter!r}"
                request.error = PolicyError(
                    f"the model{adapter} gave no token after this prompt a probability: {BROKEN_WEIGHTS}"
                )
                self._cache.clear(index)  # What a mask hides still counts, as 0 times itself.
                request.cached = 0
            elif not math.isfinite(logprob):
                limits = ("temperature", "top_p", "top_k", *DISTRIBUTION_PARAMS, *TERMINATION_PARAMS)
                names = request.params.changed(limits)
                request.error = ConfigError(f"no token can be sampled with this {', '.join(names)}; loosen it")

    def _append_token(self, request: Request, token: int, logprob: float) -> None:
        request.cached = len(request.tokens)
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if request.matcher is not None:
            request.matcher.push(token)
        if token in request.end_tokens or (request.stop_scanner is not None and request.stop_scanner.push(token)):
            request.finish_reason = "stop"
        elif len(request.tokens) >= request.max_length:
            request.finish_reason = "length"
        request.token_versions.append(self.version_of(request.adapter))

    def _ensure_capacity(self) -> None:
        """Make room for one more token in each row. Where memory forbids it, the newest rows are preempted."""
        length = max(len(request.tokens) for request in self._rows)
        if length <= self._cache.capacity:
            return
        if not self._cache.fits(self._slots_in_use, length):
            self._preempt(self._prefilling)
            self._prefilling = []
        while len(self._rows) > 1 and not self._cache.fits(self._slots_in_use, length):
            newest = self._rows[-1:]
            self._free_rows(newest)
            self._preempt(newest)
        self._cache.reserve(self._slots_in_use, length, self._slots_in_use, ahead=GROWTH_TOKENS)

    def _preempt(self, requests: list[Request]) -> None:
        """Put requests that lost their slots at the front of the queue."""
        for request in reversed(requests):
            if not request.cancelled:
                self._waiting.appendleft(request)
            request.cached, request.deferred_once = 0, False

    def _free_rows(self, leaving: list[Request]) -> None:
        """Free the slots of `leaving`, filling the gaps with the last rows."""
        if not leaving:
            return
        gone, rows = set(leaving), self._rows
        for slot in reversed(range(len(rows))):
            if rows[slot] not in gone:
                continue
            self._cache_prefix(rows[slot], slot)
            last = rows.pop()
            if slot < len(rows):
                self._cache.move(len(rows), slot, last.cached)
                rows[slot] = last
        self._batch_params = None

    def _cache_prefix(self, request: Request, slot: int) -> None:
        read = partial(self._cache.read, slot)
        self.prefix_cache.insert(request.tokens[: request.cached], read, request.adapter)

    # -- the model -------------------------------------------------------------------------------------------------

    def _decode_step(self, adapters: Sequence[str | None], tokens: list[list[int]], pasts: list[int]) -> Tensor:
        """`_forward` of one token for each row."""
        cascade = self._use_cascade
        with cascade_attention.use_cascade_attention(self.model, self._shared_prefix) if cascade else nullcontext():
            return self._forward(adapters, tokens, 0, pasts)

    def _forward(self, adapters: Sequence[str | None], tokens: list[list[int]], start: int, pasts: list[int]) -> Tensor:
        """Logits [N, V] after the last of `tokens` [N, Q], computed with an adapter for each of the rows in slots
        `start`.., after `pasts` cached tokens."""
        if not self._alone:
            return self._pass(adapters, tokens, start, pasts)
        each = enumerate(zip(adapters, tokens, pasts, strict=True), start)
        return torch.cat([self._pass([adapter], [own], slot, [past]) for slot, (adapter, own, past) in each])

    def _pass(self, adapters: Sequence[str | None], tokens: list[list[int]], start: int, pasts: list[int]) -> Tensor:
        """`_forward` in one pass."""
        device, width = self.model.device, len(tokens[0])
        self._cache.open_window(start, pasts, width, alone=self._alone)
        ids_NQ = torch.tensor(tokens, device=device)
        if self._alone:
            inputs = {"attention_mask": torch.ones(1, pasts[0] + width, dtype=torch.long, device=device)}
        else:
            positions_NQ = torch.tensor(pasts, device=device).unsqueeze(1) + torch.arange(width, device=device)
            inputs: dict[str, Any] = {
                "attention_mask": self._cache.masks(positions_NQ) if any(pasts) else None,
                "position_ids": positions_NQ.clamp_(max=self.context_length - 1),
            }
        with nullcontext() if self.adapters is None else self.adapters.use_rows(adapters):
            if self._decoder is not None:
                return self._decoder(ids_NQ, **inputs)
            cache = {self._cache_argument: self._cache}
            output = self.model(input_ids=ids_NQ, use_cache=True, logits_to_keep=1, **inputs, **cache)
        return cast(Tensor, output.logits)[:, -1]

    @torch.inference_mode()
    def _choose_passes(self) -> None:
        """Try whether rows of different lengths can share a pass: some models cut the mask they are given at a window
        of their own, count positions otherwise, or take no such mask. Theirs have a pass each. Raises RuntimeError
        where that differs from a pass without a cache, too."""
        noise, failure = self._difference(alone=True)
        reason = "its configuration has a window that its layers do not name"
        hidden = 0 < (configured_window(self.model) or 0) < self.context_length
        if self._cache.layout.has_sliding_window or not hidden:
            cascade = [True, False] if cascade_attention.supported(self.model) else [False]
            ways = [(way, False) for way in cascade]
            if decoder.supported(self.model, self._cache):
                ways.insert(0, (cascade[0], True))
            for way, lean in ways:
                worst, reason = self._difference(cascade=way, lean=lean)
                rounding = BFLOAT16_ROUNDING if lean and self.model.dtype == torch.bfloat16 else AGREEMENT
                if worst <= max(rounding, 4 * noise if math.isfinite(noise) else 0.0):
                    return
        if noise > (AGREEMENT if self.model.dtype == torch.float32 else MOST_ROUNDING):
            raise RuntimeError(f"with cached keys: {failure}")
        self._alone, self._use_cascade, self._decoder = True, False, None
        logger.warning(
            "%s samples one row after the other, which is slow for many: rows that share a pass would not be sampled "
            "from its own distribution (%s)", type(self.model).__name__, reason,
        )  # fmt: skip

    def _difference(self, *, alone: bool = False, cascade: bool = False, lean: bool = False) -> tuple[float, str]:
        """How far the logits of two rows of different lengths, as if beside a far longer one, are from those without a
        cache, as a share of their spread; and why."""
        self._alone, self._use_cascade = alone, cascade
        self._decoder = decoder.Decoder(self.model, self._cache) if lean else None
        windows = filter(None, self._cache.layout.windows.values())
        length = min(self.context_length, min([*windows, PROBED]) + PROBED) - 1
        padding = getattr(self.model.config, "pad_token_id", None)  # Some models skip it when they count positions.
        ids = [token for token in range(3, self._vocab_size)[: length + 1] if token != padding]
        rows = [(ids * length)[: max(2, count)] for count in (length, 3)][: self._cache.max_slots]
        none, lengths = [None] * len(rows), [len(row) - 1 for row in rows]
        self._cache.reserve(len(rows), length + 1, 0)
        try:
            self._forward(none, [row[:1] for row in rows], 0, [0] * len(rows))
            for slot, row in enumerate(rows):
                if rest := row[1:-1]:
                    self._forward([None], [rest], slot, [1])
            with self._cache.padded(0 if alone else max(0, min(self.context_length, MOST_PADDED) - length)):
                found = self._decode_step(none, [row[-1:] for row in rows], lengths)
        except FORWARD_ERRORS as error:
            return math.inf, f"{type(error).__name__}: {error}"
        finally:
            self._cache.release()
        plain = [self.model(input_ids=torch.tensor([row], device=found.device), use_cache=False).logits for row in rows]
        expected = torch.stack([logits[0, -1] for logits in plain]).float()
        if not expected.isfinite().all():  # Broken weights, or tokens that the model never gives: no way differs.
            return 0.0, ""
        spread = (expected.amax(-1) - expected.amin(-1)).clamp(min=1e-30)
        worst = ((found.float() - expected).abs().amax(-1) / spread).max().item()
        return math.inf if math.isnan(worst) else worst, f"logits off by {worst:.2g} of their spread"


def _allowed_tokens(rows: Sequence[Request], logits_NV: Tensor) -> Tensor | None:
    """The only tokens that may come next in each row [N, V]; None: all may."""
    allowed_NV = None
    for index, row in enumerate(rows):
        early = row.end_tokens if len(row.logprobs) < row.params.min_tokens else ()
        if row.matcher is None and not early:
            continue
        if allowed_NV is None:
            allowed_NV = torch.ones_like(logits_NV, dtype=torch.bool)
        if row.matcher is None:
            allowed_NV[index, sorted(early)] = False
        else:  # A constrained answer ends where its grammar says.
            allowed_NV[index] = row.matcher.token_mask(logits_NV.shape[-1])
    return allowed_NV


def _record_top_logprobs(rows: Sequence[Request], sampled: sampler.SampledTokens) -> None:
    """Append the most likely tokens to the rows that requested them, without tokens that could not be sampled."""
    if sampled.top_tokens is None or sampled.top_logprobs is None:
        return
    for request, tokens, values in zip(rows, sampled.top_tokens.tolist(), sampled.top_logprobs.tolist(), strict=True):
        if count := request.params.top_logprobs:
            most_likely = zip(tokens[:count], values[:count], strict=True)
            request.top_logprobs.append(tuple((token, value) for token, value in most_likely if value > -math.inf))


def _record_kept(rows: Sequence[Request], kept_RV: Tensor, limit: int) -> None:
    """Append the tokens that could be sampled. An answer at which more than `limit` could be, but not all, is not
    recorded: none of its sets would be of use without the others."""
    sizes_R = kept_RV.sum(-1)
    kept_RV &= ((sizes_R <= limit) & (sizes_R < kept_RV.shape[1]))[:, None]
    ids = kept_RV.nonzero()[:, 1].int().cpu().numpy()
    start = 0
    for request, size in zip(rows, sizes_R.tolist(), strict=True):
        if size == kept_RV.shape[1]:
            size = 0
        elif size > limit:
            request.kept, size = None, 0
        if request.kept is not None:
            request.kept.append(ids[start : start + size].tobytes())
        start += size
