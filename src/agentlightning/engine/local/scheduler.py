"""Continuous batching over one transformers causal language model: requests join and leave between any two steps.

A step prefills waiting requests (all but the last token of each, up to a budget), then draws one token for every row
that is ready. Prefill never draws, so there is one place where tokens come from. What several requests begin with is
computed once: through the prefix store, which holds what finished and prefilled requests left behind.

Not for several threads: whoever owns a `TokenGenerator` calls it from one. Before a change of the weights it calls
`forget`, for every stored key and value belongs to the old ones. Answers under way may stay: their tokens so far are
prefilled again by the new weights, as those of any request that lost its slot. Going on with old keys and values would
save that one prefill, and record log-probabilities that no weights give.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.base import FinishReason, SamplingParams
from agentlightning.engine.local import cascade_attention, kv_cache, sampler
from agentlightning.engine.local.guided_decoding import Grammars, Matcher, allowed
from agentlightning.engine.local.kv_cache import SlotCache, read_layout
from agentlightning.engine.local.prefix_cache import Match, PrefixStore, common_prefix
from agentlightning.engine.local.stop_strings import StopScanner
from agentlightning.errors import ConfigError, ContextLengthError, PolicyError

AHEAD = 256
"""Tokens of room made for an answer at the start, so that the slots seldom grow while it is drawn."""
WORTH_WAITING = 16
"""A request waits for another's prefill when that saves it at least so many tokens."""
BURST = 4
"""How many times the budget a step may prefill while nobody draws, and so nobody is held up."""
PADDING = 1.3
"""Rows are prefilled together while padding makes the forward at most so much larger."""


@dataclass(slots=True, eq=False)
class Request:
    """One answer being drawn."""

    tokens: list[int]
    """The prompt, then every token drawn."""
    prompt_length: int
    limit: int
    """The most tokens there may be."""
    params: SamplingParams
    random: random.Random
    """Its own numbers: what it draws depends on nobody beside it."""
    logprobs: list[float] = field(default_factory=list[float])
    """One for each token drawn."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    """For each token drawn the likeliest ones, where they were asked for."""
    finish_reason: FinishReason | None = None
    policy_version: int = 0
    """Of the weights that drew the last token."""
    changes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(version, how many tokens were drawn by then) where the weights changed under way."""
    cancelled: bool = False
    computed: int = 0
    """How many of the tokens have their keys and values in the request's slot."""
    fingerprints: list[bytes] = field(default_factory=list[bytes])
    """Of the prompt; see `policy.shared`."""
    waited: bool = False
    """It has already waited once for another's prefill."""
    ends: frozenset[int] = frozenset()
    """Tokens that end its answer."""
    stops: StopScanner | None = None
    matcher: Matcher | None = None
    """What its answer is held to."""

    @property
    def drawn(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def must_go_on(self) -> bool:
        """Whether it may not end yet (`min_tokens`). One that is held ends where its grammar says."""
        return self.matcher is None and len(self.logprobs) < self.params.min_tokens

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(version, how many tokens it drew), in order; empty where one version drew them all."""
        runs: list[tuple[int, int]] = []
        start = 0
        for version, end in (*self.changes, (self.policy_version, len(self.logprobs))):
            if runs and runs[-1][0] == version:
                version, count = runs.pop()
                start -= count
            if end > start:
                runs.append((version, end - start))
            start = end
        return tuple(runs) if len(runs) > 1 else ()

    @property
    def missing(self) -> int:
        """Tokens to prefill; the last one is computed by the step that draws the next."""
        return len(self.tokens) - 1 - self.computed


class TokenGenerator:
    """Draws answers from `model` for many requests at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        context_length: int,
        max_batch_size: int = 128,
        kv_cache_bytes: int = 4 << 30,
        prefix_cache_bytes: int = 1 << 30,
        prefill_tokens: int = 2048,
        seed: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        """`kv_cache_bytes` bounds the rows being computed (requests beyond wait), `prefix_cache_bytes` what is kept of
        earlier ones, `prefill_tokens` how many prompt tokens a step computes before others get their next token.
        Without `grammars` no answer can be held to a schema."""
        self.model = model
        self.context_length = context_length
        self.policy_version = 0
        """Of the weights; whoever changes them says so here."""
        self.prefixes = PrefixStore(prefix_cache_bytes)
        self._eos = eos_token_ids
        self._decode = decode
        self._grammars = grammars
        self._prefill_tokens = prefill_tokens
        self._vocabulary = kv_cache.vocabulary(model)
        self._random = random.Random(seed)
        """Gives a seed to each request that has none."""
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        """In slots from `_base` on, shortest first."""
        self._base = 0
        self._rows: list[Request] = []
        """Ready to draw, in slots from 0 on."""
        self._plan: sampler.Plan | None = None
        """For `_rows`; None after they have changed."""
        self._shared: cascade_attention.SharedPrefix | None = None
        """Likewise: what they begin with in common."""
        self._attends = cascade_attention.applies(model)
        """Whether drawing has an attention of its own."""
        model.eval()
        layout = read_layout(model)
        self._cache = SlotCache(layout, model.device, max_slots=max_batch_size, limit_bytes=kv_cache_bytes)

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self._rows or self._prefilling or self._waiting)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises ContextLengthError, ConfigError or PolicyError for a request that cannot be served."""
        sampler.check(params)
        sampler.check_tokens(params, self._vocabulary)
        if (held := params.constraint) is not None and not (self._grammars and self._grammars.knows(held[1], held[0])):
            raise ConfigError(f"answers cannot be held to this {held[0]} here; leave it out, and check them")
        if not prompt:
            raise PolicyError("the prompt has no tokens; give at least one")
        if len(prompt) >= self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.context_length}, which leaves no "
                "room for an answer; shorten the prompt, or use a model with a longer context"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise PolicyError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}, the model knows 0 to "
                f"{self._vocabulary - 1}; encode it with this model's own tokenizer"
            )

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request. Raises as `check` does."""
        self.check(prompt, params)
        room, held = self.context_length - len(prompt), params.constraint
        request = Request(
            tokens=list(prompt),
            prompt_length=len(prompt),
            limit=len(prompt) + min(room, params.max_tokens or room),
            params=params,
            fingerprints=cascade_attention.fingerprints(prompt[:-1]) if self._attends else [],
            ends=params.end_tokens(self._eos),
            stops=StopScanner(params.stop, self._decode) if params.stop else None,
            matcher=self._grammars.matcher(held[1], held[0]) if self._grammars and held else None,
            random=random.Random(self._random.getrandbits(64) if params.seed is None else params.seed),
        )
        self._waiting.append(request)
        return request

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """Stop drawing for `request`; its row is free at once."""
        request.cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
        self._leave([row for row in self._rows if row is request])
        while self._prefilling and self._prefilling[-1].cancelled:
            self._prefilling.pop()

    def forget(self, *, in_flight: bool = False) -> None:
        """Drop every stored key and value. Call it before each change of the weights; with `in_flight`, requests under
        way lose their slots and go on after it, else there may be none (PolicyError)."""
        if not self.idle and not in_flight:
            raise PolicyError(
                "requests are under way; wait for them before the weights change, or change them with in_flight=True"
            )
        under_way = [*self._rows, *(request for request in self._prefilling if not request.cancelled)]
        for request in (*under_way, *self._waiting):  # One that waits may have drawn before it lost its slot.
            request.changes.append((self.policy_version, len(request.logprobs)))
        self._rows, self._prefilling = [], []
        self._wait_again(under_way)
        self.prefixes.clear()
        self._plan = self._shared = None

    def release(self) -> None:
        """Give the memory of the slots back, unless somebody is in them; the next request takes it again."""
        if not (self._rows or self._prefilling):
            self._cache.release()

    def abort(self) -> list[Request]:
        """Drop everything under way and stored; returns the requests dropped."""
        dropped = [*self._rows, *self._prefilling, *self._waiting]
        self._rows, self._prefilling, self._plan = [], [], None
        self._waiting.clear()
        self.forget()
        self.release()
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """The random state."""
        return {"random": self._random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.setstate(state["random"])

    # -- a step ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Draw one token for each ready row; returns these requests. A finished one has its `finish_reason` set.
        Raises PolicyError where the model's output is not a distribution."""
        if self.model.training:
            self.model.eval()
        self._prefill()
        return self._draw() if self._rows else []

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Admit and prefill until the budget is used or nothing can be admitted."""
        budget = self._prefill_tokens * (1 if self._rows else BURST)
        while budget > 0:
            part = min(budget, self._prefill_tokens)
            if not self._prefilling:
                self._admit(part)
            if not self._prefilling:
                return
            budget -= self._prefill_some(part)

    def _admit(self, budget: int) -> None:
        """Take waiting requests while there is room and budget. Those with nothing to prefill are ready at once."""
        taken: list[tuple[Request, Match]] = []
        later: list[Request] = []
        missing, longest = 0, max((len(row.tokens) for row in self._rows), default=0)
        while self._waiting and missing < budget:
            request = self._waiting[0]
            longest = max(longest, len(request.tokens))
            if not self._cache.fits(len(self._rows) + len(taken) + 1, longest):
                break
            self._waiting.popleft()
            match = self.prefixes.match(request.tokens[:-1])
            if self._better_wait(request, match, taken):
                later.append(request)
                continue
            taken.append((request, match))
            missing += len(request.tokens) - 1 - match.length
        self._waiting.extendleft(reversed(later))
        if taken:
            self._place(taken)

    def _better_wait(self, request: Request, match: Match, taken: list[tuple[Request, Match]]) -> bool:
        """Whether another request, about to be prefilled, shares clearly more with this one than is stored."""
        if request.waited or self.prefixes.limit_bytes <= 0:
            return False
        needed = match.length + WORTH_WAITING
        if len(request.tokens) <= needed:
            return False
        request.waited = any(common_prefix(other.tokens[:-1], request.tokens) >= needed for other, _ in taken)
        return request.waited

    def _place(self, taken: list[tuple[Request, Match]]) -> None:
        """Give each request a slot and the keys and values that are stored for it: first those that are ready."""
        taken.sort(key=lambda pair: len(pair[0].tokens) - pair[1].length)
        requests = [request for request, _ in taken]
        self._make_room(self._rows + requests)
        for slot, (request, match) in enumerate(taken, start=len(self._rows)):
            for node, count in match.nodes:
                self._cache.write(slot, request.computed, node.segment, count)
                request.computed += count
        ready = [request for request in requests if not request.missing]
        self._rows += ready
        self._base = len(self._rows)
        self._prefilling = requests[len(ready) :]
        self._plan = None

    def _make_room(self, requests: list[Request]) -> None:
        """Slots for `requests`, with room for their answers to grow where the limit allows it."""
        longest = max(len(request.tokens) for request in requests)
        ample = max(min(request.limit, len(request.tokens) + AHEAD) for request in requests)
        if not self._rows and self._cache.capacity > 4 * ample:
            self._cache.release()
        self._cache.reserve(len(requests), longest, len(self._rows), ahead=ample - longest)

    def _prefill_some(self, budget: int) -> int:
        """One forward over the first of the prefilling rows; returns how many tokens it computed."""
        rows = self._next_run()
        width = min(rows[-1].missing, max(1, budget // len(rows)))
        pasts = [request.computed for request in rows]
        self._cache.reserve(self._used, max(pasts) + width, self._used)
        self._forward([self._chunk(request, width) for request in rows], self._base, pasts)
        for request in rows:
            request.computed += min(width, request.missing)
        done = [request for request in rows if not request.missing]
        self._join(done)
        return width * len(rows)

    @property
    def _used(self) -> int:
        """How many slots hold something."""
        return self._base + len(self._prefilling) if self._prefilling else len(self._rows)

    def _next_run(self) -> list[Request]:
        """The rows to compute together: the shortest ones, while padding them to one width wastes little."""
        rows, total = [self._prefilling[0]], self._prefilling[0].missing
        for request in self._prefilling[1:]:
            total += request.missing
            if request.missing * (len(rows) + 1) > PADDING * total:
                break
            rows.append(request)
        return rows

    @staticmethod
    def _chunk(request: Request, width: int) -> list[int]:
        """The next `width` tokens to prefill, padded with a token whose keys and values are overwritten later."""
        end = min(request.computed + width, len(request.tokens) - 1)
        tokens = request.tokens[request.computed : end]
        return tokens + tokens[-1:] * (width - len(tokens))

    def _join(self, done: list[Request]) -> None:
        """Move prefilled rows, the first of the prefilling ones, to the ready ones; keep their prompts for others."""
        for request in done:
            slot = self._base
            self._base += 1
            self._prefilling.pop(0)
            if request.cancelled:
                continue
            if slot != len(self._rows):
                self._cache.move(slot, len(self._rows), request.computed)
            self._rows.append(request)
            self._remember(request, len(self._rows) - 1)
        self._plan = None

    # -- draw ------------------------------------------------------------------------------------------------------

    def _draw(self) -> list[Request]:
        self._grow()
        rows = list(self._rows)
        if self._plan is None:
            self._plan = sampler.make_plan([request.params for request in rows], self.model.device)
            self._shared = self._find_shared()
        with cascade_attention.attending(self.model, self._shared) if self._attends else nullcontext():
            logits = self._forward([row.tokens[-1:] for row in rows], 0, [row.computed for row in rows])
        uniform = torch.tensor([row.random.random() for row in rows], dtype=torch.float64, device=self.model.device)
        before = [row.drawn for row in rows] if self._plan.penalties else ()
        may = allowed([row.matcher for row in rows], logits.shape[-1], logits.device)
        may = sampler.forbid(may, logits, {place: row.ends for place, row in enumerate(rows) if row.must_go_on})
        seen = [row.tokens for row in rows] if self._plan.repetition else ()
        draw = sampler.draw(logits, self._plan, uniform, before, may, seen)
        # One transfer for both: float64 holds token ids and float32 log-probabilities exactly.
        drawn = torch.stack([draw.tokens.double(), draw.logprobs.double()]).tolist()
        for request, token, logprob in zip(rows, *drawn, strict=True):
            self._take(request, int(token), logprob)
        _keep_top(rows, draw)
        self._leave([request for request in rows if request.finish_reason is not None])
        return rows

    def _find_shared(self) -> cascade_attention.SharedPrefix | None:
        """What the rows have in common, with its keys and values; those of the step before where they still fit."""
        layout = self._cache.layout
        if not self._attends or layout.slides or any(request.missing for request in self._rows):
            return None
        groups = cascade_attention.find_groups(
            [request.fingerprints for request in self._rows],
            [request.computed for request in self._rows],
            layout.bytes_per_token // len(layout.kinds),
        )
        if groups is None:
            return None
        old = self._shared
        if old is not None and (old.groups.names, old.groups.length) == (groups.names, groups.length):
            layers = old.layers
        else:
            layers = self._cache.gather([rows[0] for rows in groups.rows], groups.length)
        return cascade_attention.SharedPrefix(groups, layers, *cascade_attention.layout(groups, self.model.device))

    def _take(self, request: Request, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            raise PolicyError(
                f"the model gave token {token} the log-probability {logprob}: its weights no longer hold finite "
                "numbers; go back to an earlier checkpoint and lower the learning rate"
            )
        request.computed = len(request.tokens)
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if request.matcher is not None:
            request.matcher.push(token)
        if token in request.ends or (request.stops is not None and request.stops.push(token)):
            request.finish_reason = "stop"
        elif len(request.tokens) >= request.limit:
            request.finish_reason = "length"
        request.policy_version = self.policy_version

    def _grow(self) -> None:
        """Room for one more token in each row. Where the limit forbids it, the newest rows wait again."""
        length = max(len(request.tokens) for request in self._rows)
        if length <= self._cache.capacity:
            return
        if not self._cache.fits(self._used, length):
            self._wait_again(self._prefilling)
            self._prefilling = []
        while len(self._rows) > 1 and not self._cache.fits(self._used, length):
            newest = self._rows[-1:]
            self._leave(newest)
            self._wait_again(newest)
        self._cache.reserve(self._used, length, self._used, ahead=AHEAD)

    def _wait_again(self, requests: list[Request]) -> None:
        """Requests that lost their slots go first in the queue."""
        self._waiting.extendleft(reversed(requests))
        for request in requests:
            request.computed, request.waited = 0, False

    def _leave(self, leaving: list[Request]) -> None:
        """Free the slots of `leaving`, closing the gaps with the last rows."""
        if not leaving:
            return
        gone = set(map(id, leaving))
        rows = self._rows
        for slot in range(len(rows) - 1, -1, -1):
            if id(rows[slot]) not in gone:
                continue
            self._remember(rows[slot], slot)
            last = rows.pop()
            if slot < len(rows):
                self._cache.move(len(rows), slot, last.computed)
                rows[slot] = last
        self._plan = None

    def _remember(self, request: Request, slot: int) -> None:
        self.prefixes.insert(request.tokens[: request.computed], lambda a, b: self._cache.read(slot, a, b))

    # -- the model -------------------------------------------------------------------------------------------------

    def _forward(self, tokens: list[list[int]], start: int, pasts: list[int]) -> Tensor:
        """Logits [N, V] after the last of `tokens` [N, Q], computed in slots start.., `pasts` tokens into each row."""
        device, width = self.model.device, len(tokens[0])
        self._cache.open(start, pasts, width)
        ids_NQ = torch.tensor(tokens, device=device)
        positions_NQ = torch.tensor(pasts, device=device).unsqueeze(1) + torch.arange(width, device=device)
        output = self.model(
            input_ids=ids_NQ,
            attention_mask=self._cache.masks(positions_NQ) if any(pasts) else None,
            position_ids=positions_NQ.clamp_(max=self.context_length - 1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cast(Tensor, output.logits)[:, -1]


def _keep_top(rows: Sequence[Request], draw: sampler.Draw) -> None:
    """Note the likeliest tokens for the rows that asked; those that could not be drawn are no alternatives."""
    if draw.top_tokens is None or draw.top_logprobs is None:
        return
    for request, tokens, values in zip(rows, draw.top_tokens.tolist(), draw.top_logprobs.tolist(), strict=True):
        if count := request.params.top_logprobs:
            likeliest = zip(tokens[:count], values[:count], strict=True)
            request.top_logprobs.append(tuple((token, value) for token, value in likeliest if value > -math.inf))
