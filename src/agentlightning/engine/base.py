"""The contract of an engine: prompt tokens go in, sampled tokens and their log-probabilities come out.

The gateway needs only `Engine`. Text, templates and tool calls are the business of `agentlightning.chat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, Protocol, cast

from agentlightning.chat.base import ChatFormat
from agentlightning.errors import ConfigError, ContextLengthError, PolicyError
from agentlightning.util.kept_sets import KeptSets
from agentlightning.util.settings import Section

ConstraintKind = Literal["json_schema", "grammar"]
"""The fields of `SamplingParams` that constrain the form of an answer."""

FinishReason = Literal["stop", "length"]
"""stop: an end-of-turn token or a stop string; length: max_tokens or the end of the context."""

TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens at one position, (token, log-probability), most likely first."""

OnTokens = Callable[..., None]
"""Callback for new tokens: `on_tokens(token_ids)`, or with `SamplingParams.stream_logprobs`
`on_tokens(token_ids, logprobs, top_logprobs)`, each as in `Sample`."""

DISTRIBUTION_PARAMS = (
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens"),
    *("json_schema", "grammar"),
)
"""Fields of `SamplingParams` beyond temperature, top_p and top_k that change the distribution. Not every engine
supports them, and no loss can correct for them."""
TERMINATION_PARAMS = ("stop_token_ids", "ignore_eos")
"""Fields that decide when an answer ends. Not every engine supports them."""

_MOST = 2**31 - 1
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, _MOST),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "logit_bias": (-100.0, 100.0),
    "max_tokens": (1, _MOST),
    "min_tokens": (0, _MOST),
    "seed": (-(2**63), 2**63 - 1),
}
"""The lowest and highest value of numeric fields of `SamplingParams`; whole numbers where the bounds are. Within them
float32 holds what becomes of a logit, so that finite logits give a distribution."""


def out_of_range(name: str, value: object) -> str | None:
    """What to use in place of a value that is not in RANGES; None for one that is."""
    low, high = RANGES[name]
    whole, open_low = isinstance(low, int), name == "top_p"
    kinds = int if whole else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high and (value or not open_low):
        return None
    bounds = f"{low} to {high}" if whole else f"{low:g} to {high:g}"
    return f"use a {'whole ' if whole else ''}number {'above' if open_low else 'from'} {bounds}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample the next tokens."""

    temperature: float = 1.0
    """0 is greedy: the recorded log-probabilities are then those of temperature 1, and no loss accepts them."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_tokens: int | None = None
    """None: up to the end of the context."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer. The tokens that complete one are kept; the text from it on is not shown."""
    seed: int | None = None
    top_logprobs: int = 0
    """Number of most likely tokens to report at each position, with their log-probabilities."""
    stream_logprobs: bool = False
    """Pass log-probabilities to `on_tokens` too (see `OnTokens`), from an engine that supports it."""
    min_p: float = 0.0
    """Tokens with less than this share of the most likely token's probability are not sampled."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token sampled before."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it was sampled before."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, value added to its logit)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or sampled before."""
    min_tokens: int = 0
    """No token that ends the answer is sampled before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer in addition to the end-of-turn tokens."""
    ignore_eos: bool = False
    """End-of-turn tokens do not end the answer."""
    json_schema: str | None = None
    """JSON schema, as text, that constrains the answer: tokens that would violate it are not sampled. Only for an
    engine that can enforce it (`Engine.can_enforce`)."""
    grammar: str | None = None
    """Grammar in llguidance's dialect (`agentlightning.chat.answer_grammar`) that constrains the answer likewise."""
    record_kept: bool = False
    """Record the tokens that top_k and top_p kept (`Sample.kept_sets`), from an engine that can."""

    @property
    def constraint(self) -> tuple[ConstraintKind, str] | None:
        """The schema or grammar that constrains the answer."""
        if self.grammar is not None:
            return "grammar", self.grammar
        return None if self.json_schema is None else ("json_schema", self.json_schema)

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from the most likely ones only, and from nothing that is reshaped otherwise."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0) and not self.distribution_params

    @property
    def distribution_params(self) -> tuple[str, ...]:
        """Names of the `DISTRIBUTION_PARAMS` that are set."""
        return self.changed(DISTRIBUTION_PARAMS)

    def changed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these parameters that do not have their default."""
        return tuple(name for name in names if getattr(self, name) != getattr(_DEFAULT, name))

    def unsupported(self, supported: frozenset[str]) -> tuple[str, ...]:
        """Names of the parameters set here that an engine ignores, given its `Engine.supported_params`."""
        return self.changed(name for name in (*DISTRIBUTION_PARAMS, *TERMINATION_PARAMS) if name not in supported)

    def end_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end the answer, given the model's end-of-turn tokens."""
        return (frozenset() if self.ignore_eos else eos_token_ids) | frozenset(self.stop_token_ids)


_DEFAULT = SamplingParams()


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled answer."""

    token_ids: tuple[int, ...]
    """Every sampled token, the end-of-turn token included."""
    logprobs: tuple[float, ...]
    """One for each token, under the distribution it was sampled from (temperature, top_p, top_k and all else)."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that sampled the last token."""
    versions: tuple[tuple[int, int], ...] = ()
    """(policy version, number of tokens it sampled), in order, where the weights changed during the answer; empty
    where one version sampled all of it."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most likely tokens at the position of each token; empty unless requested."""
    kept_sets: KeptSets | None = None
    """The tokens that top_k and top_p kept at the position of each; None where they were not requested, or one has more
    than the engine records."""


def version_runs(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """`Sample.versions`, from the version of each token."""
    runs = [(version, len(list(tokens))) for version, tokens in groupby(versions)]
    return tuple(runs) if len(runs) > 1 else ()


class PromptTokensError(ConfigError):
    """A prompt has ids of tokens that the model does not have."""


class EngineUnavailableError(PolicyError):
    """An engine that samples nothing for now, or any more; the message says why."""


class Engine(Protocol):
    """What samples from a policy. Subclass it to inherit the defaults of the optional members."""

    @property
    def model(self) -> str:
        """The model name that agents request."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        ...

    @property
    def chat(self) -> ChatFormat: ...

    @property
    def policy_version(self) -> int:
        """0 for the weights as opened; it grows with each update and each `load`, and is never reused."""
        ...

    @property
    def supported_params(self) -> frozenset[str]:
        """Names from `DISTRIBUTION_PARAMS` and `TERMINATION_PARAMS` that the engine supports. Default: none."""
        return frozenset()

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """Whether the engine can constrain answers to this JSON schema or grammar. Default: no."""
        return False

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """Sample one answer. `on_tokens` is called in the caller's event loop with each new token or run of tokens.
        Cancelling the call frees the engine's resources. Calls with the same `affinity` share their history: an engine
        of several servers sends them to the same one. Raises ContextLengthError when the prompt leaves no room."""
        ...


def room_for_answer(prompt: Sequence[int], context_length: int, max_tokens: int | None = None) -> int:
    """Number of tokens that an answer may have, at most `max_tokens`. Raises PolicyError for an empty prompt,
    ContextLengthError for one that leaves no room."""
    if not prompt:
        raise PolicyError("the prompt has no tokens; give at least one")
    if len(prompt) >= context_length:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and the context holds {context_length}, which leaves no room for an "
            "answer; shorten the prompt, or use a model with a longer context"
        )
    room = context_length - len(prompt)
    return min(room, max_tokens or room)


# -- stop strings ------------------------------------------------------------------------------------------------------

# Incremental search for stop strings in a growing answer, without decoding it from the start again.

REPLACEMENT = "�"
"""What a decoder writes for bytes that do not form a whole character yet."""
MAX_CHARACTER_TOKENS = 4
"""UTF-8 characters have at most this many bytes, and so at most this many tokens."""


class StopScanner:
    """Scans one answer. `decode` turns token ids into text."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._overlap = max(len(stop) for stop in stops) - 1
        self._tail = ""
        """The last `_overlap` characters of the scanned text."""
        self._window: list[int] = []
        self._scanned = 0
        """Number of leading tokens of the window already scanned; they stay as context for decoders that need it."""

    def push(self, token: int) -> bool:
        """Append the next token; True once the text contains a stop string."""
        self._window.append(token)
        scanned = self._decode(self._window[: self._scanned]) if self._scanned else ""
        new = self._decode(self._window)[len(scanned) :]
        text = self._tail + new
        if any(stop in text for stop in self._stops):
            return True
        complete = bool(new) and not new.endswith(REPLACEMENT)
        if complete or len(self._window) - self._scanned >= MAX_CHARACTER_TOKENS:
            self._tail = text[max(0, len(text) - self._overlap) :]
            self._window = self._window[self._scanned :]
            self._scanned = len(self._window)
        return False


# -- adapters ----------------------------------------------------------------------------------------------------------

# Engines that answer some agents with weights of their own: adapters over one model.
#
# The adapters of an engine share its queue, batches and updates. What differs is the model name they are requested by,
# the version of their weights, and what samples.


class AdapterTable(Section):
    """Which adapters answer which agents. None as an adapter stands for the weights below them."""

    own: str | None = None
    """The adapter of the engine itself."""
    views: Mapping[str, str | None] = {}
    """Model name -> adapter, of what answers single agents."""
    agents: Mapping[str, str] = {}
    """Agent -> model name: the engine's, or one of `views`."""
    others: str = ""
    """The model name for all other agents."""


class AgentEngines:
    """The part of an `Engine` that answers some agents with other weights than its own, as its `table` says."""

    model: str
    table = AdapterTable()

    def version_of(self, adapter: str | None) -> int:
        """The version of an adapter's weights; see `Engine.policy_version`, which is that of the newest."""
        raise NotImplementedError

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """`sample` from an adapter."""
        raise NotImplementedError

    @cached_property
    def views(self) -> Mapping[str, Engine]:
        """The engines of these weights, by the model names that agents may request them by."""
        return {model: AdapterView(self, model, adapter) for model, adapter in self.table.views.items()}

    @property
    def versions(self) -> Mapping[str, int]:
        """The version of the weights behind each of these names, and behind its own."""
        adapters = {self.model: self.table.own, **self.table.views}
        return {model: self.version_of(adapter) for model, adapter in adapters.items()}

    def for_agent(self, agent: str | None) -> Engine:
        """What answers the calls of an agent: this engine, or one of `views`."""
        return self.views.get(self.table.agents.get(agent or "", self.table.others), cast("Engine", self))

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`."""
        return await self.sample_adapter(self.table.own, prompt_token_ids, params, on_tokens, affinity=affinity)


class EngineWrapper:
    """What an engine that samples through another has in common with it."""

    @property
    def engine(self) -> Engine:
        """The other one."""
        raise NotImplementedError

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    @property
    def chat(self) -> ChatFormat:
        return self.engine.chat

    @property
    def supported_params(self) -> frozenset[str]:
        return self.engine.supported_params

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return await self.engine.can_enforce(text, kind)


@dataclass(frozen=True, slots=True)
class AdapterView(EngineWrapper):
    """An `Engine` that samples from one adapter of another."""

    agents: AgentEngines
    model: str
    adapter: str | None

    @property
    def engine(self) -> Engine:
        return cast("Engine", self.agents)

    @property
    def policy_version(self) -> int:
        return self.agents.version_of(self.adapter)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`."""
        return await self.agents.sample_adapter(self.adapter, prompt_token_ids, params, on_tokens, affinity=affinity)
