"""Sessions: finished rollouts of a store with all that was recorded of their model calls, tokens or text.

A call whose tokens were recorded is learned from as it was sampled. One that an agent reported itself, or that another
model answered, has messages only: its prompt and answer are rendered by the chat template of the model that learns, so
that its tokens are known and the probability they were sampled with is not. So are calls with tokens of another
tokenizer, which the text of their answers gives away.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agentlightning import span as names
from agentlightning.assemble import AUTOMATIC_REWARDS, calls, link_rewards, trajectory
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.messages import chat_messages, read_conversation
from agentlightning.chat.reasoning import find_reasoning_markers, split_thought
from agentlightning.chat.tool_calls.format import Tools
from agentlightning.credit import is_target, names_of, of_target
from agentlightning.credit.rejection import (
    MISSING_REWARD,
    NO_TARGET_CALLS,
    REJECTING,
    UNREADABLE,
    Rejection,
    count_reasons,
    describe_reasons,
    rejection,
)
from agentlightning.errors import ConfigError, DatasetError, RewardError
from agentlightning.rollouts import Rollout, RolloutMode
from agentlightning.span import Span
from agentlightning.store.base import LightningStore, write_pending
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import load_dataset, task_key
from agentlightning.trajectory import Reward, Trajectory, Transition, scalar_reward
from agentlightning.util.json_values import recorded_objects

PAGE = 1000
"""Rollouts in one request to the store."""
MEASURED = frozenset({"val", "test"})
"""Modes of rollouts that measured something: they are never learned from."""
PART = " part "
"""Between the id of a rollout and the number of its part."""
NO_CALLS = "no_calls"
NO_MESSAGES = "no_messages"
NO_LOGPROBS = "no_logprobs"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One model call."""

    span_id: str
    sequence_id: int
    agent: str | None
    messages: tuple[Message, ...]
    """Of the request; empty where they were not recorded."""
    answer: Message | None
    tools: tuple[dict[str, Any], ...] = ()
    transition: Transition | None = None
    """With its tokens, where they were recorded."""
    reward: Reward | None = None
    """The intermediate reward between this call and the next."""
    tokens: Transition | Rejection | None = None
    """In tokens of the model that learns, or why it cannot be, once a `Tokenizer` has read it."""


@dataclass(frozen=True, slots=True)
class Session:
    """One finished rollout."""

    rollout: Rollout
    trajectory: Trajectory
    """Its rewards. The calls are in `calls`."""
    calls: tuple[RecordedCall, ...]
    """All calls that count, in order."""
    rewards: Mapping[str, Reward] = field(default_factory=dict[str, Reward])
    """See `RewardLinks.parts`."""

    def score(self, weights: Any = None) -> float | Rejection:
        """Its reward as one number, or why it has none: dimensions without weights, say."""
        try:
            found = scalar_reward(self.trajectory.team_reward, weights)
        except RewardError as error:
            return rejection(self.rollout.rollout_id, error)
        way_out = "call agl.emit_reward in the session, or score recorded sessions with `agl rescore`"
        missing = Rejection(self.rollout.rollout_id, MISSING_REWARD, f"it has no reward; {way_out}")
        return missing if found is None else found

    def reward(self, weights: Any = None) -> float | None:
        """Its reward as one number; None where it has none."""
        found = self.score(weights)
        return None if isinstance(found, Rejection) else found

    def parts(self) -> list[Session]:
        """The session; where it holds several rewards, one for each: a reward belongs to the calls between it and the
        one before. Calls after the last one have none."""
        if not self.rewards:
            return [self]
        found: list[Session] = []
        own: list[RecordedCall] = []
        for call in self.calls:
            own.append(replace(call, reward=None))
            if call.span_id in self.rewards or call is self.calls[-1]:
                name = f"{self.rollout.rollout_id}{PART}{len(found) + 1}"
                part = replace(self.trajectory, rollout_id=name, reward=self.rewards.get(call.span_id))
                found.append(Session(replace(self.rollout, rollout_id=name), part, tuple(own)))
                own = []
        return found

    @property
    def has_independent_parts(self) -> bool:
        """Whether each of several rewards is due to its own part: no call continues an earlier one, and no AIR rule has
        given rewards beside them."""
        if not self.rewards or AUTOMATIC_REWARDS in self.trajectory.metadata:
            return False
        seen: list[tuple[Message, ...]] = []
        for call in self.calls:
            if any(call.messages[: len(each)] == each != call.messages for each in seen if each):
                return False
            seen.append(call.messages)
        return True


@dataclass(frozen=True, slots=True)
class Sessions:
    """What a store holds to learn from."""

    usable: tuple[Session, ...]
    rejected: tuple[Rejection, ...] = ()
    """Rollouts whose spans cannot be read, or hold no model call."""
    measured: int = 0
    """Rollouts of the modes val and test, which are left alone."""

    def check(self) -> None:
        """Raises DatasetError where nothing can be learned from, with the reasons."""
        if self.usable:
            return
        held = [describe_reasons(count_reasons(self.rejected))] * bool(self.rejected)
        held += [f"{self.measured} of the modes val and test"] * bool(self.measured)
        left_out = f" (left out: {', '.join(held)})" if held else ""
        raise DatasetError(
            f"the store has no finished session to learn from{left_out}; record"
            " some with agl.track_session, or run an agent on tasks with Trainer.fit"
        )

    def check_target(self, target: str | None) -> None:
        """Raises DatasetError for an agent that made no call, with the names that were seen."""
        seen = {call.agent for session in self.usable for call in session.calls}
        if target is None or any(is_target(agent, target) for agent in seen):
            return
        raise DatasetError(
            f"no call of {len(self.usable)} sessions is of an agent called {target!r}; there are {names_of(seen)}."
            " Change target_agent, or name the agent with agl.track_agent"
        )


async def read_sessions(
    store: LightningStore, *, known: AbstractSet[str] = frozenset(), ids: Sequence[str] | None = None
) -> Sessions:
    """The succeeded rollouts of a store in the order of their creation, without those that are `known`; with `ids`, no
    others."""
    await asyncio.to_thread(write_pending)
    wanted = None if ids is None else set(ids)
    rollouts = [
        each
        async for each in succeeded(store)
        if each.rollout_id not in known and (wanted is None or each.rollout_id in wanted)
    ]
    learned = {each.rollout_id: each for each in rollouts if each.mode not in MEASURED}
    usable: list[Session] = []
    rejected: list[Rejection] = []
    if learned:
        async for rollout_id, spans in store.iter_spans(list(learned)):
            found = await asyncio.to_thread(session_of, learned[rollout_id], spans)
            (rejected if isinstance(found, Rejection) else usable).append(found)  # pyright: ignore[reportArgumentType]
    return Sessions(tuple(usable), tuple(rejected), len(rollouts) - len(learned))


async def succeeded(store: LightningStore, modes: Sequence[RolloutMode] | None = None) -> AsyncIterator[Rollout]:
    """The succeeded rollouts of some modes (None: of all), in the order of their creation."""
    after: str | None = None
    while page := await store.query_rollouts(status_in=["succeeded"], mode_in=modes, after=after, limit=PAGE):
        for rollout in page:
            yield rollout
        after = page[-1].rollout_id


def group_of(rollout: Rollout) -> str:
    """The same for the rollouts of one task."""
    group = rollout.metadata.get("group")
    return group if isinstance(group, str) else task_key(rollout.input)


def session_of(rollout: Rollout, spans: Sequence[Span]) -> Session | Rejection:
    """A rollout with its calls, or why it cannot be read."""
    attempt_id = spans[-1].attempt_id if spans else ""
    own = [span for span in spans if span.attempt_id == attempt_id]
    try:
        found = trajectory(rollout.rollout_id, attempt_id, own, group_of(rollout))
        links = link_rewards(own)
        known, rewards = {each.span_id: each for each in found.transitions}, links.intermediate
        recorded = tuple(_call(span, known.get(span.span_id), rewards.get(span.span_id)) for span in calls(own))
    except (*REJECTING, *UNREADABLE) as error:
        return rejection(rollout.rollout_id, error)
    if not recorded:
        return Rejection(rollout.rollout_id, NO_CALLS, "it made no model call; report them with agl.emit_prompt")
    return Session(rollout, replace(found, task=rollout.input), recorded, links.parts)


def _call(span: Span, transition: Transition | None, reward: Any) -> RecordedCall:
    attributes = span.attributes
    answers = chat_messages(recorded_objects(attributes.get(names.OUTPUT_MESSAGES)), thoughts=True)
    agent = attributes.get(names.AGENT_NAME)
    tools = tuple(recorded_objects(attributes.get(names.TOOL_DEFINITIONS)))
    return RecordedCall(
        span.span_id,
        span.sequence_id,
        agent if isinstance(agent, str) else None,
        tuple(chat_messages(recorded_objects(attributes.get(names.INPUT_MESSAGES)), thoughts=True)),
        {**answers[0], "role": "assistant"} if answers else None,
        tools,
        transition,
        reward,
    )


# -- tokens ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenizedSession:
    """A session in the tokens of the model that learns."""

    trajectory: Trajectory
    logprobs: bool = False
    """Whether all calls of the agents to train have the log-probabilities they were sampled with."""
    rendered: int = 0
    """Calls that were rendered from text."""
    foreign: int = 0
    """Among those, calls with tokens of another tokenizer."""


def without_probabilities(trajectory: Trajectory) -> Trajectory:
    """The trajectory for losses that imitate: nothing in it says how its tokens were sampled."""
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "reshaped": (), "kept_sets": None, "versions": ()}
    calls = (replace(call, **plain, policy_version=None) for call in trajectory.transitions)
    return replace(trajectory, transitions=tuple(calls))


def _texts(answer: Message) -> list[str]:
    found = [str(answer.get("content") or "")]
    found += [str(call["function"]["name"]) for call in answer.get("tool_calls", ())]
    return [text for text in found if text]


def _squeezed(text: str) -> str:
    return "".join(text.split())


# -- conversations ---------------------------------------------------------------------------------------------------

# Conversations as trajectories: what an assistant wrote becomes sampled tokens.
#
# A conversation is rendered by the model's own chat template, turn by turn, into the same tokens that the gateway would
# have built while an agent had it: the tokens of an answer are those that the template's text has after its prompt.
# Where a template rewrites earlier turns, each answer follows the prompt it would really have; a thought that the
# template strips is written as the model would. What deviates from the template's text is counted, by the names below.

TOO_LONG = "too_long"
NOTES = {
    "end_of_turn_added": "answers whose end the chat template does not mark end with the end-of-sequence token",
    "thoughts_added": "answers whose thoughts the chat template strips have them as the model writes them",
    "thoughts_left_out": "answers have a thought that the chat template has no place for; it is not trained",
    "empty_thoughts": "answers without a thought, after prompts that begin one, end it at once",
    "tools_in_messages": "answers were given with tools, calls or results in the text of messages, in Hermes' format",
    "drift": "answers have tokens that the chat template's own text would not have, as a token spans their beginning",
}
"""What is counted of answers, and what it means."""
_logger = logging.getLogger(__name__)


def describe_notes(counts: Mapping[str, int]) -> tuple[str, ...]:
    """A sentence for each kind that was counted."""
    return tuple(f"{count} {NOTES[name]}" for name, count in sorted(counts.items()) if count)


def renamed(call: Transition, name: str) -> Transition:
    """The same call under this name, without how it was sampled: a rollout that is in a dataset twice is trained
    twice."""
    tokens = call.response_token_ids
    place = name, "", f"{name}/{call.sequence_id}", call.sequence_id
    return Transition(*place, call.prompt_token_ids, tokens, (0.0,) * len(tokens), agent=call.agent)


def _conversation(record: Any, name: str) -> tuple[list[Message], list[dict[str, Any]] | None]:
    tools: Any = None
    messages: Any = record
    if isinstance(record, Mapping):
        fields = cast("Mapping[str, Any]", record)
        messages, tools = fields.get("messages"), fields.get("tools")
    turns = cast("list[Any]", messages) if isinstance(messages, list) else []
    if not turns or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        shown = repr(record)[:80]
        raise DatasetError(f'{name} is {shown}; give {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    return read_conversation(turns, tools, f"{name}: ")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Puts sessions and conversations into tokens of one model, and counts what deviates from its chat template."""

    chat: ChatFormat
    context_length: int
    vocabulary: int | None = None
    """Token ids are smaller than this. None: unknown."""
    target: str | None = None
    """Only agents whose whole name matches must have usable calls."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """What deviates from the chat template, by the names of `NOTES`."""

    def read(self, session: Session) -> Session:
        """The session with the tokens of its calls, which it and its parts then have whatever is made of them."""
        return replace(session, calls=tuple(replace(each, tokens=self.tokens(each)) for each in session.calls))

    def __call__(self, session: Session) -> TokenizedSession | Rejection:
        """The session's calls as transitions. Calls of other agents that cannot be put into tokens are left out; where
        one of the agents to train cannot, the session is."""
        name, attempt_id = session.rollout.rollout_id, session.trajectory.attempt_id
        transitions: list[Transition] = []
        logprobs, rendered, foreign, own = True, 0, 0, 0
        for call in session.calls:
            trained, found = is_target(call.agent, self.target), call.tokens or self.tokens(call)
            if isinstance(found, Rejection):
                if trained:
                    return replace(found, rollout_id=name)
                continue
            own += trained
            is_rendered = found is not call.transition
            rendered, foreign = rendered + is_rendered, foreign + (is_rendered and call.transition is not None)
            if trained and (is_rendered or found.temperature <= 0):
                logprobs = False
            transitions.append(replace(found, rollout_id=name, attempt_id=attempt_id, reward=call.reward))
        if not own:
            return Rejection(name, NO_TARGET_CALLS, f"no call is of an agent {self.target!r}")
        trajectory = replace(session.trajectory, transitions=tuple(transitions))
        return TokenizedSession(trajectory, logprobs, rendered, foreign)

    def tokens(self, call: RecordedCall) -> Transition | Rejection:
        """A call as it was sampled where its tokens are of this tokenizer, else rendered from its text; or why it
        cannot be."""
        if call.transition is not None and self._is_own(call.transition, call):
            return call.transition
        name = f"call {call.span_id}"
        if not call.messages or call.answer is None:
            message = f"of {name} neither tokens of this model nor prompt and answer were recorded"
            return Rejection(name, NO_MESSAGES, message)
        try:
            before, text, end = self._text(call.messages, call.answer, call.tools, "the answer")
        except (ConfigError, DatasetError) as error:
            return Rejection(name, NO_MESSAGES, f"{name}: {error}")
        prompt, answer = tuple(self.chat.encode(before)), (*self._encode(before, text)[0], *end)
        place = "", "", call.span_id, call.sequence_id
        found = Transition(*place, prompt, answer, (0.0,) * len(answer), agent=call.agent)
        return self.too_long(name, [found]) or found

    def _is_own(self, transition: Transition, call: RecordedCall) -> bool:
        """Whether the tokens are of this tokenizer: each has an id in it, and they give the recorded answer."""
        ids = (*transition.prompt_token_ids, *transition.response_token_ids)
        if self.vocabulary is not None and max(ids) >= self.vocabulary:
            return False
        if call.answer is None:
            return True
        text = _squeezed(self.chat.decode(transition.response_token_ids, skip_special_tokens=False))
        return all(_squeezed(part) in text for part in _texts(call.answer))

    def trajectories(self, records: Sequence[Any], rejected: list[Rejection] | None = None) -> list[Trajectory]:
        """Each record as a trajectory whose sampled tokens are the assistant's, without those that the model cannot
        hold, which are added to `rejected`. A DatasetError counts records from 1."""
        found: list[Trajectory] = []
        for number, record in enumerate(records, 1):
            name = f"conversation {number}"
            calls = (
                record.transitions
                if isinstance(record, Trajectory)
                else self.answers(*_conversation(record, name), name)
            )
            try:
                own = tuple(renamed(call, name) for call in calls)
            except ConfigError as error:
                raise DatasetError(f"{name}: {error}") from error
            if not any(call.prompt_token_ids or call.response_token_ids for call in own):
                raise DatasetError(f"{name} has no assistant turn to learn from; remove it from the dataset")
            if (too_long := self.too_long(name, own)) is None:
                found.append(Trajectory(name, "", own))
            elif rejected is not None:
                rejected.append(too_long)
        return found

    def too_long(self, name: str, calls: Iterable[Transition]) -> Rejection | None:
        """Rejects a conversation that the model cannot hold."""
        tokens = max(len(call.prompt_token_ids) + len(call.response_token_ids) for call in calls)
        if tokens <= self.context_length:
            return None
        return Rejection(name, TOO_LONG, f"{name} has {tokens} tokens, the model holds {self.context_length}")

    def answers(self, messages: Sequence[Message], tools: Tools, name: str) -> Iterator[Transition]:
        """One transition for each assistant turn: the tokens before it as the prompt, its own as the response; its
        `sequence_id` is the place of the turn among the messages, from 1. None for turns of `weight` 0, as OpenAI's
        fine-tuning format has it. `name` is what a DatasetError calls them."""
        chat, text, ids = self.chat, "", list[int]()
        for position, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            before, answer, end = self._text(messages[:position], message, tools, f"{name}: turn {position + 1}")
            more, follows = chat.encode_after(text, before[len(text) :]) if before.startswith(text) else ([], False)
            prompt = [*ids, *more] if text and follows else chat.encode(before)
            tokens, exact = self._encode(before, answer)
            agent = message.get("name")
            yield Transition(name, "", "", position + 1, tuple(prompt), (*tokens, *end), (), agent=agent)
            text, ids = (before + answer, prompt + tokens) if exact else ("", [])

    def _encode(self, before: str, answer: str) -> tuple[list[int], bool]:
        tokens, exact = self.chat.encode_after(before, answer)
        self._count("drift", not exact)
        return tokens, exact

    def _text(
        self, messages: Sequence[Message], answer: Message, tools: Tools, name: str
    ) -> tuple[str, str, tuple[int, ...]]:
        """(prompt, answer up to its end of turn, the token that ends it where the template writes none)."""
        chat, markers = self.chat, find_reasoning_markers(self.chat)
        before = chat.render(messages, tools)
        through = chat.render([*messages, answer], tools, add_generation_prompt=False)
        if markers and markers.opened and chat.takes_thoughts and markers.start in through[len(before) :]:
            thought, written = split_thought(markers, answer)
            rest = str(answer["content"]).lstrip().removeprefix(markers.start).removeprefix(written)
            if thought:  # The template does not look for a thought in the content.
                answer = {**answer, "content": rest, "reasoning_content": thought}
                through = chat.render([*messages, answer], tools, add_generation_prompt=False)
        answer_text = self._after(before, through, answer, name)
        spoken = any(each["role"] == "tool" or "tool_calls" in each for each in (*messages, answer))
        self._count("tools_in_messages", chat.tools_in_messages and bool(tools or spoken))
        ends = (chat.decode([token]) for token in sorted(chat.eos_token_ids))
        found = [at + len(end) for end in ends if (at := answer_text.find(end)) >= 0]
        self._count("end_of_turn_added", not found)
        # At the first of several ends the sampler stops.
        return before, answer_text[: min(found, default=len(answer_text))], () if found else (chat.end_of_turn,)

    def _after(self, before: str, through: str, answer: Message, name: str) -> str:
        """What the model writes after the prompt: the template's text, with the thought that it strips."""
        markers = find_reasoning_markers(self.chat)
        thought, written = split_thought(markers, answer) if markers else (str(answer.get("reasoning_content", "")), "")
        if through.startswith(before):
            text = through[len(before) :]
            if thought and self.chat.escape(thought) not in text:
                self._count("thoughts_left_out", markers is None)
                self._count("thoughts_added", markers is not None)
                return text if markers is None else markers.start + self.chat.escape(written) + text.lstrip()
            return text
        start = before.rfind(markers.start) if markers else -1
        if markers is None or start < 0 or not through.startswith(before[:start]):
            raise DatasetError(
                f"{name}: the chat template does not render it after its own prompt, which ends in {before[-60:]!r}:"
                " leave the turn out, or give the model a chat template whose history begins like its prompts"
            )
        # The prompt begins a thought, and the history has none, or writes it otherwise.
        opening, text = before[start:], through[start:]
        if markers.end in opening:  # And ends it: the model is not to think.
            self._count("thoughts_left_out", bool(thought))
            return text.partition(markers.end)[2].lstrip() if text.startswith(markers.start) else text
        if text.startswith(markers.start):
            return text.removeprefix(markers.start).removeprefix(opening.removeprefix(markers.start))
        self._count("thoughts_added" if thought else "empty_thoughts", True)
        written = written or f"\n{markers.end}\n\n"
        gap = opening.removeprefix(markers.start)
        return self.chat.escape(written.removeprefix(gap)) + text.lstrip()

    def _count(self, name: str, holds: bool) -> None:
        if not holds:
            return
        if not self.counts[name]:
            _logger.warning("some %s", NOTES[name])
        self.counts[name] += 1


# -- filters -----------------------------------------------------------------------------------------------------------

# Which sessions are demonstrations: by reward, by agreement, the best of each task, without duplicates.
#
# Learning from the successful ones alone is rejection sampling fine-tuning (Yuan et al. 2023, arXiv:2308.01825); bounds
# of a task's pass rate leave out what teaches nothing, because it is always solved, or hardly can be.


MIN_VOTES = 3
"""Fewer sessions of a task have no majority."""


async def read_query(query: TrajectoryQuery) -> list[Session]:
    """What a query selects now; empty where that is nothing."""
    return _select((await read_sessions(query.store)).usable, query)[0]


def successful(sessions: Sequence[Session], query: TrajectoryQuery) -> tuple[list[Session], dict[str, int]]:
    """The sessions that the query selects, of those with several rewards the parts that earned it, and how many were
    left out by reason. Raises DatasetError where none is."""
    found, left_out = _select(sessions, query)
    if not found:
        raise DatasetError(_none(sessions, query, left_out))
    return found, left_out


def _select(sessions: Sequence[Session], query: TrajectoryQuery) -> tuple[list[Session], dict[str, int]]:
    if not query.self_verified:
        sessions = [part for session in sessions for part in session.parts()]
    counts: Counter[str] = Counter()
    groups: dict[str, list[Session]] = {}
    for session in sessions:
        groups.setdefault(session.trajectory.group, []).append(session)
    found: list[Session] = []
    for group in groups.values():
        found += _of_task(group, query, counts)
    return found, {reason: count for reason, count in counts.items() if count}


def _of_task(group: Sequence[Session], query: TrajectoryQuery, counts: Counter[str]) -> list[Session]:
    kept: list[Session] = []
    if query.self_verified:
        kept = _agreeing(group)
        counts["disagrees"] += len(group) - len(kept)
    else:
        scores = [session.score(query.reward_weights) for session in group]
        for session, score in zip(group, scores, strict=True):
            if isinstance(score, Rejection):
                counts[score.reason] += 1
            elif score < query.threshold:
                counts["below_threshold"] += 1
            else:
                kept.append(session)
    low, high = query.pass_rate or (0.0, 1.0)
    if not low <= len(kept) / len(group) <= high:
        counts["pass_rate"] += len(kept)
        return []
    if query.deduplicate:
        unique: dict[str, Session] = {}
        for session in kept:
            unique.setdefault(_content(session), session)
        counts["duplicate"] += len(kept) - len(unique)
        kept = list(unique.values())
    if query.best_of is not None and len(kept) > query.best_of:
        counts["best_of"] += len(kept) - query.best_of
        ranked = sorted(kept, key=lambda session: -(session.reward(query.reward_weights) or 0.0))[: query.best_of]
        kept = [session for session in kept if session in ranked]
    return kept


def _agreeing(group: Sequence[Session]) -> list[Session]:
    """The sessions whose last answer is that of the majority; none where there is no majority."""
    last = (session.calls[-1].answer or {} for session in group)
    answers = [" ".join(str(each.get("content") or "").split()).casefold() for each in last]
    known = Counter(answer for answer in answers if answer)
    if len(group) < MIN_VOTES or not known:
        return []
    answer, votes = known.most_common(1)[0]
    if votes * 2 <= len(group):
        return []
    return [session for session, own in zip(group, answers, strict=True) if own == answer]


def _content(session: Session) -> str:
    """What makes two sessions of one task the same: what was answered, by whom, whatever the ids of tool calls."""
    found: list[Any] = []
    for call in session.calls:
        answer, tokens = call.answer or {}, call.transition and call.transition.response_token_ids
        functions = [each["function"] for each in answer.get("tool_calls", ())]
        found.append((call.agent, answer.get("content"), functions) if answer else (call.agent, tokens))
    return json.dumps(found, sort_keys=True, default=str)


def _none(sessions: Sequence[Session], query: TrajectoryQuery, left_out: dict[str, int]) -> str:
    shown = describe_reasons(left_out)
    if query.self_verified:
        advice = f"record at least {MIN_VOTES} sessions of each task"
    else:
        scores = [session.score(query.reward_weights) for session in sessions]
        rewards = [score for score in scores if not isinstance(score, Rejection)]
        spans = f"rewards are from {min(rewards):g} to {max(rewards):g}: " if rewards else "there are no rewards: "
        unusable = (each for each in scores if isinstance(each, Rejection) and each.reason != MISSING_REWARD)
        if not rewards and (first := next(unusable, None)):
            return f"none of {len(sessions)} sessions is a demonstration ({shown}); of the first: {first.message}"
        advice = f"{spans}lower threshold={query.threshold:g}, or emit rewards with agl.emit_reward"
    return f"none of {len(sessions)} sessions is a demonstration ({shown or 'there are none'}); {advice}"


# -- demonstrations --------------------------------------------------------------------------------------------------

# What supervised learning imitates: conversations, trajectories, or the successful sessions of a store.


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Records before they are put into tokens: conversations, trajectories and sessions."""

    training: Sequence[Any]
    validation: Sequence[Any] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sessions that were not chosen, by reason."""


async def load_demonstrations(dataset: Any, validation: Any, *, share: float, seed: int) -> Demonstrations:
    """The records to learn from and to measure on. Raises DatasetError where there is none, and ConfigError for both
    a `share` and a validation set."""
    if validation is not None and share:
        raise ConfigError(f"validation_share={share:g} is for a dataset without validation conversations; leave it out")
    records, left_out = await _records(dataset)
    if validation is not None:
        return Demonstrations(records, (await _records(validation))[0], left_out)
    count = round(share * len(records))
    if share and not 0 < count < len(records):
        raise DatasetError(f"validation_share={share:g} of {len(records)} conversations is {count}; give more of them")
    order = list(range(len(records)))
    random.Random(f"validation/{seed}").shuffle(order)
    held_back, training = sorted(order[:count]), sorted(order[count:])
    return Demonstrations([records[i] for i in training], [records[i] for i in held_back], left_out)


async def _records(dataset: Any) -> tuple[Sequence[Any], dict[str, int]]:
    if isinstance(dataset, TrajectoryQuery):
        sessions = await read_sessions(dataset.store)
        sessions.check()
        found, counts = successful(sessions.usable, dataset)
        measured = {"modes_val_and_test": sessions.measured} if sessions.measured else {}
        return found, {**count_reasons(sessions.rejected), **counts, **measured}
    if isinstance(dataset, list | tuple) and any(isinstance(each, Session | Trajectory) for each in dataset):
        return cast("Sequence[Any]", dataset), {}
    return await asyncio.to_thread(load_dataset, dataset), {}


def to_examples(records: Sequence[Any], tokenizer: Tokenizer) -> tuple[list[Trajectory], dict[str, int]]:
    """The records as trajectories whose sampled tokens are to be imitated, and sessions that cannot be, by reason.
    Raises DatasetError where none can."""
    rejected: list[Rejection] = []
    found = tokenizer.trajectories([each for each in records if not isinstance(each, Session)], rejected)
    target = tokenizer.target
    for made in (tokenizer(each) for each in records if isinstance(each, Session)):
        if isinstance(made, Rejection):
            rejected.append(made)
        else:
            found.append(made.trajectory)
    examples = [each for one in found if (each := of_target(one, target)).transitions]
    counts = Counter(each.reason for each in rejected)
    counts["no_target_calls"] += len(found) - len(examples)
    if not examples:
        seen = sorted({str(call.agent or "calls without a name") for each in found for call in each.transitions})
        first = f" The first: {rejected[0].message}" if rejected else ""
        raise DatasetError(
            f"none of {len(records)} demonstrations can be learned from (target_agent={target!r}; agents seen:"
            f" {', '.join(seen) or 'none'}).{first}"
        )
    return examples, {reason: count for reason, count in counts.items() if count}
