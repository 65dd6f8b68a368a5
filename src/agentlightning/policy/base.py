"""What a policy promises: it samples, it learns, and both use the same weights.

The gateway needs only `Engine`; an algorithm needs `Policy`. Tokens go in and tokens come out; text, templates and
tool calls are the business of `ChatFormat`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from agentlightning.chat.tool_calls.format import CallFormat, ParsedMessage, ParsedToolCall
from agentlightning.trajectory import TrainingSample

__all__ = [
    "CallFormat",
    "ChatFormat",
    "Engine",
    "FinishReason",
    "Message",
    "ParsedMessage",
    "ParsedToolCall",
    "Policy",
    "Sample",
    "SamplingParams",
]

HeldTo = Literal["json_schema", "grammar"]
"""The fields of `SamplingParams` that an answer can be held to."""

FinishReason = Literal["stop", "length"]
"""stop: an end-of-turn token or a stop string; length: max_tokens or the end of the context."""

Message = dict[str, Any]
"""A chat message as the OpenAI chat-completions wire has it: role, content, tool_calls, tool_call_id, name."""


RESHAPING: Final = (
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens"),
    *("json_schema", "grammar"),
)
"""Fields of `SamplingParams` that change the distribution, and that not every engine honours."""
ENDING: Final = ("stop_token_ids", "ignore_eos")
"""Fields that say when an answer ends; likewise."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw the next tokens."""

    temperature: float = 1.0
    """0 is greedy: the recorded log-probabilities are then those of temperature 1, and no loss accepts them."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_tokens: int | None = None
    """None: up to the end of the context."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the tokens that complete one are kept, the text from it on is not shown."""
    seed: int | None = None
    top_logprobs: int = 0
    """How many of the likeliest tokens to name at each place, with their log-probabilities."""
    tells_logprobs: bool = False
    """An engine that can calls `on_tokens(token_ids, logprobs, top_logprobs)`, each as `Sample` has it, instead of
    `on_tokens(token_ids)`."""
    min_p: float = 0.0
    """Tokens with less than this share of the likeliest one's probability are not drawn."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token drawn before."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token once for each time it was drawn before."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or drawn before are divided by it where they are positive, else multiplied."""
    min_tokens: int = 0
    """Before so many tokens, none that ends the answer is drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer beside those that end a turn."""
    ignore_eos: bool = False
    """Tokens that end a turn do not end the answer."""
    json_schema: str | None = None
    """The JSON schema, as text, that the answer is held to: tokens that would break it are not drawn. Only for an
    engine that says it can (`holds_to`)."""
    grammar: str | None = None
    """The grammar that the answer is held to, as llguidance reads it (`policy.answer_grammar`); likewise."""

    @property
    def held(self) -> tuple[HeldTo, str] | None:
        """What the answer is held to."""
        if self.grammar is not None:
            return "grammar", self.grammar
        return None if self.json_schema is None else ("json_schema", self.json_schema)

    @property
    def reshaping(self) -> tuple[str, ...]:
        """Names of what is set beyond temperature, top_p and top_k that changes the distribution. Not every engine
        honours it (`unhonoured`), and no loss can correct for it."""
        return tuple(name for name in RESHAPING if _is_set(self, name))

    def end_tokens(self, turn_ends: frozenset[int]) -> frozenset[int]:
        """The tokens that end the answer, `turn_ends` being those that end a turn."""
        return (frozenset() if self.ignore_eos else turn_ends) | frozenset(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the engine drew."""

    token_ids: tuple[int, ...]
    """Every token drawn, the end-of-turn token included."""
    logprobs: tuple[float, ...]
    """One for each token: under the temperature, top_p, top_k and whatever else it was drawn with."""
    finish_reason: FinishReason
    policy_version: int
    """Of the weights that drew the last token."""
    versions: tuple[tuple[int, int], ...] = ()
    """(policy version, how many tokens it drew), in order, where the weights changed while the answer was drawn;
    empty where one version drew them all."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest ones at its place, (token, log-probability), likeliest first; empty unless asked
    for."""


class ChatFormat(Protocol):
    """A model's way to write conversations: its chat template, its tokenizer, its tool-call format."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        ...

    tool_calls: CallFormat
    """How the model writes tool calls."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text, by the model's chat template. Raises ConfigError on messages it cannot hold."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of rendered text: special tokens are recognised, none is added."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def parse(self, text: str, tools: Sequence[dict[str, Any]] | None = None) -> ParsedMessage:
        """Content and tool calls of an answer (without its end-of-turn token), `tools` being those it was offered.
        Never fails: what is not a well-formed tool call stays in the content."""
        ...


class Engine(Protocol):
    """What samples from a policy."""

    @property
    def model(self) -> str:
        """The name agents ask for."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together."""
        ...

    @property
    def chat(self) -> ChatFormat: ...

    @property
    def policy_version(self) -> int:
        """0 for the weights as opened; more after each update and each `load`, never less and never the same again."""
        ...

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """Draw one answer. `on_tokens` is called in the caller's event loop with each new token or run of tokens.
        Cancelling the call frees the engine. Calls of the same `affinity` share their history: an engine of several
        servers sends them to the same one. Raises ContextLengthError when the prompt leaves no room."""
        ...


def unhonoured(engine: Engine, params: SamplingParams) -> tuple[str, ...]:
    """What of `params` an engine would ignore. One that does not say what it honours honours none of `RESHAPING`
    and `ENDING`."""
    honoured: frozenset[str] = getattr(engine, "reshapes", frozenset())
    asked = (*params.reshaping, *(name for name in ENDING if getattr(params, name)))
    return tuple(name for name in asked if name not in honoured)


def _is_set(params: SamplingParams, name: str) -> bool:
    value = getattr(params, name)
    return value != 1 if name == "repetition_penalty" else bool(value)


async def holds_to(engine: Engine, text: str, kind: HeldTo = "json_schema") -> bool:
    """Whether an engine can hold answers to a JSON schema, or a grammar; one that does not count it among what it
    honours (`unhonoured`), or has no method `holds_to`, cannot."""
    asked: Callable[[str, HeldTo], Awaitable[bool]] | None = getattr(engine, "holds_to", None)
    return asked is not None and kind in getattr(engine, "reshapes", ()) and await asked(text, kind)


class Policy(Engine, Protocol):
    """An engine that learns.

    Answers under way when `train` or `load` changes the weights are dealt with in one of two ways. Without `in_flight`
    there may be none: the caller holds new ones back and lets those under way finish first (`gateway.gate`). With
    `in_flight` they go on across the change and none fails: each token drawn after it, and its log-probability, is
    what the new weights give after all the tokens before it, whoever drew those; `Sample.versions` says which weights
    drew how many. Either way, an answer that begins after the change is drawn by the new weights alone, and nothing
    computed with the old ones (stored prefixes too) is used for it.
    """

    @property
    def can_update_in_flight(self) -> bool:
        """Whether `train` and `load` take `in_flight=True`."""
        ...

    async def train(
        self, samples: Sequence[TrainingSample], *, in_flight: bool = False, **options: Any
    ) -> Mapping[str, float]:
        """One optimiser step over all samples; raises policy_version by one; returns metrics (loss, grad_norm, ...).

        Raises PolicyError where answers are under way without `in_flight`, ConfigError where `in_flight` cannot be. An
        update that failed leaves the answers under way as they were."""
        ...

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        """Write a checkpoint `transformers` loads; with `training_state`, also all that a resume needs."""
        ...

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """Continue from a checkpoint saved with `training_state`: weights, optimiser, random state. The weights get a
        policy_version of their own: one more than the present one, the saved one and `above`. Raises as `train` does;
        a checkpoint that is damaged or does not fit is refused before anything changes."""
        ...

    async def close(self) -> None: ...
