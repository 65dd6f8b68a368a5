"""How the answers of our engines are sampled: what a training rollout overrides, and what a request constrains.

A `seed` makes all rollouts of a group equal, so that none is better than another; top_p, top_k, min_p, penalties and
biases sample from another distribution than the one a trainer computes; temperature 0 explores nothing. In rollouts of
the mode train these parameters have the neutral values below, unless the rollout's LLM resource sets them. All other
calls are sampled with the caller's parameters. Overridden parameters are logged once, recorded on the span
(`span.OVERRIDDEN`) and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Final, Literal

from agentlightning.chat.answer_grammar import AnswerShape, answer_grammar
from agentlightning.chat.base import ChatFormat, ParsedToolCall, ThoughtMarkers
from agentlightning.chat.reasoning import find_reasoning_markers
from agentlightning.chat.tool_calls.format import CallReader, Tools, partial_marker_length
from agentlightning.engine.base import Engine, Sample, SamplingParams, TopLogprobs
from agentlightning.gateway.answer import Answer, Event, ReasoningDelta, ToolCall
from agentlightning.gateway.dialects.base import NO_PARAMETERS, Constraint, Request, json_schema
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.http import offload
from agentlightning.gateway.record import Counters
from agentlightning.gateway.routing import ResolvedCall
from agentlightning.util.json_values import Json

logger = logging.getLogger(__name__)

NEUTRAL: Final = {
    "temperature": 1.0,
    "seed": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
"""Fields of `SamplingParams`, and of requests -> neutral values."""
_ALSO_NEUTRAL: Final = {"top_k": -1, "logit_bias": {}}
"""Other neutral values in a request."""


class OnPolicySampling:
    """Says how calls are sampled, whatever the agent asks for, and logs each name that is overridden once."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._logged: set[str] = set()

    def forced_params(self, call: ResolvedCall, learns: bool = True) -> tuple[str, Json, list[str]]:
        """(name of the LLM resource, parameters that it or a URL of 1.0 sets, names of those of the request that are
        overridden). `learns`: the answer has tokens, so that it may be learned from if the model is the policy of the
        rollout: its resources name this model, or none at all."""
        context, mode, model = call.context, call.caller.mode, call.route.name
        if context is None:
            return "", {}, []
        resource, forced = context.sampling_parameters(model)
        is_policy = model in context.llms or (learns and not context.llms)
        if call.caller.temperature is not None and is_policy:
            forced = {"temperature": call.caller.temperature, **forced}
        is_trained = learns and is_policy and (context.mode or mode) == "train"
        return resource, forced, self._overridden(call.body, forced) if is_trained else []

    def _overridden(self, request: Json, forced: Json) -> list[str]:
        """The parameters of a request that are overridden, which are counted; of temperatures without one that is
        `forced`, only 0 is."""
        changed = [
            name
            for name, neutral in NEUTRAL.items()
            if request.get(name) not in (None, neutral, _ALSO_NEUTRAL.get(name), forced.get(name))
            and (name != "temperature" or name in forced or request[name] == 0)
        ]
        self._counters.overridden += bool(changed)
        if new := [name for name in changed if name not in self._logged]:
            self._logged.update(new)
            logger.warning(
                "agents set %s in training rollouts; this is overridden, since learning needs samples of the policy "
                "itself (evaluation uses it); set it in the sampling_parameters of the LLM resource to force it",
                ", ".join(new),
            )
        return changed


# -- constrained sampling ----------------------------------------------------------------------------------------------


async def constrain_sampling(
    engine: Engine, chat: ChatFormat, params: SamplingParams, request: Request, size: int
) -> SamplingParams:
    """`params` with the schema or grammar of the answer, if the request has any and the engine can enforce it. Work for
    a request of `size` bytes leaves the event loop if it is large."""
    constraint, tools = request.constraint, request.tools
    if not constraint:
        return params
    markers = find_reasoning_markers(chat)
    stops_after_call = chat.tool_calls.closing is not None and markers is None
    if not tools and markers is None:
        if constraint.content and await engine.can_enforce(constraint.content.schema):
            return replace(params, json_schema=constraint.content.schema)
    elif "grammar" in engine.supported_params and constraint.can_be_violated(stops_after_call):
        for outline in await offload(size, lambda: list(_outlines(constraint, tools or (), markers))):
            grammar = await offload(size, partial(answer_grammar, chat, outline))
            if grammar is not None and await engine.can_enforce(grammar, "grammar"):
                return replace(params, grammar=grammar)
    return params


def _outlines(constraint: Constraint, tools: Sequence[Json], markers: ThoughtMarkers | None) -> Iterator[AnswerShape]:
    """The shape of the answer; then, as a fallback, the same with any arguments for tools that are not strict, whose
    schemas may use what cannot be enforced."""
    functions, names = [tool["function"] for tool in tools], constraint.names
    schemas = {
        function["name"]: _argument_schema(function.get("parameters"))
        for function in functions
        if names is None or function["name"] in names
    }
    loose = {name: schema if name in constraint.arguments else "{}" for name, schema in schemas.items()}
    for arguments in (schemas,) if loose == schemas else (schemas, loose):
        yield AnswerShape(
            tools=tuple(arguments.items()),
            needs_call=constraint.requires_tool_call,
            one_call=constraint.single_tool_call,
            content=constraint.content.schema if constraint.content else None,
            thought=markers,
        )


def _argument_schema(parameters: Any) -> str:
    """A tool without parameters takes no arguments; one whose parameters are no schema takes any."""
    try:
        return json_schema("tools.parameters", parameters or NO_PARAMETERS).schema
    except ApiError:  # Only strict tools need a valid schema.
        return "{}"


# -- the answer while it is sampled ------------------------------------------------------------------------------------

# Turns tokens into text, reasoning and tool calls, and emits nothing it may take back. Ambiguous text is buffered:
# incomplete UTF-8, the possible beginning of a stop string or tool call, and whitespace or text that may belong to a
# reasoning marker. The emitted events together are exactly `message`, however the tokens were split. If the engine
# streams log-probabilities, each event carries those of its own tokens; otherwise the last event carries all.


Token = tuple[int, float, TopLogprobs]
"""A sampled token, its log-probability, and the most likely tokens at its position if requested."""


class Detokenizer:
    """Decodes tokens incrementally.

    Each step decodes a window that starts where the text was last complete, so that tokenizers which treat the first
    token of a text differently do no harm.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._tokens: list[int] = []
        self._before = 0
        self._shown = 0

    def feed(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        """The text that is complete now; at the end, incomplete characters become U+FFFD."""
        self._tokens.extend(token_ids)
        if self._shown == len(self._tokens):
            return ""
        text = self._chat.decode(self._tokens[self._before :])
        if self._shown > self._before:
            text = text[len(self._chat.decode(self._tokens[self._before : self._shown])) :]
        if text.endswith("�") and not is_last:
            return ""
        self._before, self._shown = self._shown, len(self._tokens)
        return text


class ReasoningFilter:
    """Separates the reasoning at the start of an answer from its content; drops whitespace next to the markers."""

    def __init__(self, markers: ThoughtMarkers | None) -> None:
        self._start, self._end = (markers.start, markers.end) if markers else ("", "")
        self._buffer = ""
        self._part: Literal["start", "thought", "content"] = "content" if markers is None else "start"
        """What the buffer is part of; `start`: not known yet."""
        self._trims = False
        """The next whitespace is next to a marker."""
        if markers is not None and markers.opened:
            self._part, self._trims = "thought", True

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """(reasoning, content) that are complete now."""
        self._buffer += text
        thought = content = ""
        if self._part == "start":
            self._begin(is_last)
        if self._part == "thought":
            thought = self._think(is_last)
        if self._part == "content":
            content, self._buffer = self._trimmed(), ""
            self._trims = self._trims and not content
        return thought, content

    def _begin(self, is_last: bool) -> None:
        start, begins = self._start, self._buffer.lstrip()
        if begins.startswith(start):
            self._part, self._trims, self._buffer = "thought", True, begins[len(start) :]
        elif is_last or not start.startswith(begins):
            self._part = "content"

    def _think(self, is_last: bool) -> str:
        marker, buffer = self._end, self._trimmed()
        thought, end, rest = buffer.partition(marker)
        if end:
            self._part, self._trims, self._buffer = "content", True, rest
            return thought.rstrip()
        thought = buffer[: len(buffer) - (0 if is_last else partial_marker_length(buffer, marker))].rstrip()
        self._trims, self._buffer = self._trims and not thought, buffer[len(thought) :]
        return thought

    def _trimmed(self) -> str:
        return self._buffer.lstrip() if self._trims else self._buffer


@dataclass(slots=True, kw_only=True)
class SampledAnswer(Answer):
    """An answer of one of our engines."""

    chat: ChatFormat
    stop_tokens: tuple[int, ...] = ()
    """Further tokens that end the answer, besides those that end a turn; they are not part of the text."""
    single_tool_call: bool = False
    """The request allows at most one tool call."""
    tools: Tools = None
    """The tools of the request, from which some formats read the types of arguments; None: it offers none, and a tool
    call is ordinary content."""
    top_logprobs: int = 0
    """The number of likeliest tokens that the caller is told; spans may keep more."""
    call_ids: Sequence[str] = ()
    """The ids of its tool calls where it is a recorded answer: prompts may contain them."""
    reasoning_markers: ThoughtMarkers | None = None
    """How the model marks reasoning; None if it does not."""
    sample: Sample | None = None
    _text: Detokenizer = field(init=False)
    _reasoning_filter: ReasoningFilter = field(init=False)
    _call_reader: CallReader = field(init=False)
    _written_ids: list[int] = field(default_factory=list, init=False)
    """Tokens of the log-probabilities written last."""

    def __post_init__(self) -> None:
        Answer.__post_init__(self)
        self._text = Detokenizer(self.chat)
        self._reasoning_filter = ReasoningFilter(self.reasoning_markers)
        self._call_reader = CallReader(self.chat.tool_calls, self.tools)

    def feed(
        self, token_ids: Sequence[int], logprobs: Sequence[float] = (), tops: Sequence[TopLogprobs] = ()
    ) -> list[Event]:
        """The events after more tokens, with their log-probabilities if the engine streams them."""
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        if logprobs:
            known = zip_longest(token_ids, logprobs, tops[: len(token_ids)])
            self._tokens += [(token, value, top or ()) for token, value, top in known]
        ends = self.chat.eos_token_ids
        visible = [token for token in token_ids if token not in ends and token not in self.stop_tokens]
        self._read(*self._reasoning_filter.feed(self._stop.feed(self._text.feed(visible))))
        return self.take_new()

    def begin(self, token_ids: Sequence[int]) -> list[Event]:
        """The events of tokens that the answer begins with, and that were sampled for another."""
        events = self.feed(token_ids)
        self.num_tokens, self.token_ids = 0, []
        return events

    def finish(self, sample: Sample) -> list[Event]:
        """The remaining events, once the sample is complete."""
        events = self.feed(sample.token_ids[self.num_tokens :]) if self.num_tokens < len(sample.token_ids) else []
        self.sample = sample
        self.end(sample.finish_reason)
        rest = self._stop.feed(self._text.feed((), is_last=True)) + self._stop.finish()
        self._read(*self._reasoning_filter.feed(rest, is_last=True))
        if self.tools is not None:
            self._add(self._call_reader.finish())
        return events + self.take_new()

    @property
    def engine_stops(self) -> tuple[str, ...]:
        """Stop strings for the engine: those of the request, and the end of the only tool call."""
        return (*self.stops, self.chat.tool_calls.closing or "") if self.stops_after_tool_call else self.stops

    @property
    def stops_after_tool_call(self) -> bool:
        """Whether sampling stops after the first tool call. Not for a model that reasons, which may write calls in its
        reasoning; nor for a constrained answer, which ends by itself and may contain the end marker in an argument."""
        return (
            self.single_tool_call
            and not self.is_constrained
            and self.reasoning_markers is None
            and self.chat.tool_calls.closing is not None
        )

    def take_token_ids(self) -> list[int]:
        taken, self._written_ids = self._written_ids, []
        return taken

    def _all_tokens(self) -> list[Any]:
        if self.sample is not None and len(self._tokens) < len(self.sample.token_ids):  # Few callers request them.
            sample, known = self.sample, len(self._tokens)
            tops = sample.top_logprobs or ((),) * len(sample.token_ids)
            self._tokens += list(zip(sample.token_ids, sample.logprobs, tops, strict=True))[known:]
        return self._tokens

    def _shown(self, tokens: Sequence[Token]) -> list[Json]:
        self._written_ids = [token for token, _, _ in tokens]
        return [
            self._token(token, value) | {"top_logprobs": [self._token(*other) for other in top[: self.top_logprobs]]}
            for token, value, top in tokens
        ]

    def _token(self, token: int, logprob: float) -> Json:
        text = self.chat.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _read(self, thought: str, content: str) -> None:
        if thought:
            self._append(ReasoningDelta(thought))
        if self.tools is not None:
            self._add(self._call_reader.feed(content))
        elif content:
            self._append(content)

    def _add(self, parts: Sequence[str | ParsedToolCall]) -> None:
        for part in parts:
            if not isinstance(part, str):
                part = ToolCall(len(self.tool_calls), self._call_id(part), part.name, part.arguments)
                self.tool_calls.append(part)
            self._append(part)

    def _call_id(self, call: ParsedToolCall) -> str:
        if len(self.tool_calls) < len(self.call_ids):
            return self.call_ids[len(self.tool_calls)]
        # If the model wrote an id itself, it will refer to the call by it.
        taken = {known.id for known in self.tool_calls}
        return call.id if call.id and call.id not in taken else self.chat.tool_calls.new_id(self.call_prefix)
