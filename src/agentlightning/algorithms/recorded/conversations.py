"""Conversations as trajectories: what an assistant wrote becomes sampled tokens.

A conversation is rendered by the model's own chat template, turn by turn, into the same tokens that the gateway would
have built while an agent had it: the tokens of an answer are those that the template's text has after its prompt. Where
a template rewrites earlier turns, each answer follows the prompt it would really have; a thought that the template
strips is written as the model would. What deviates from the template's text is counted, by the names below.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.messages import read_conversation
from agentlightning.chat.reasoning import find_reasoning_markers, split_thought
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import DatasetError
from agentlightning.trajectory import Trajectory, Transition

TOO_LONG: Final = "too_long"
NOTES: Final = {
    "end_of_turn_added": "answers whose end the chat template does not mark end with the end-of-sequence token",
    "thoughts_added": "answers whose thoughts the chat template strips have them as the model writes them",
    "thoughts_left_out": "answers have a thought that the chat template has no place for; it is not trained",
    "empty_thoughts": "answers without a thought, after prompts that begin one, end it at once",
    "tools_in_messages": "answers were given with tools, calls or results in the text of messages, in Hermes' format",
    "drift": "answers have tokens that the chat template's own text would not have, as a token spans their beginning",
}
"""What is counted of answers, and what it means."""
_logger: Final = logging.getLogger(__name__)


def describe_notes(counts: Mapping[str, int]) -> tuple[str, ...]:
    """A sentence for each kind that was counted."""
    return tuple(f"{count} {NOTES[name]}" for name, count in sorted(counts.items()) if count)


def to_trajectories(
    records: Sequence[Any],
    chat: ChatFormat,
    context_length: int,
    counts: Counter[str] | None = None,
    rejected: list[Rejection] | None = None,
) -> list[Trajectory]:
    """Each record as a trajectory whose sampled tokens are the assistant's, without those that the model cannot hold,
    which are added to `rejected`. A DatasetError counts records from 1; `counts` gets the deviations from the template
    (`NOTES`)."""
    renderer = AnswerRenderer(chat, Counter() if counts is None else counts)
    found: list[Trajectory] = []
    for number, record in enumerate(records, 1):
        made = _trajectory(record, f"conversation {number}", renderer)
        longest = max(len(call.prompt_token_ids) + len(call.response_token_ids) for call in made.transitions)
        if longest <= context_length:
            found.append(made)
        elif rejected is not None:
            rejected.append(too_long(made.rollout_id, longest, context_length))
    return found


def too_long(name: str, tokens: int, context_length: int) -> Rejection:
    """A conversation that is dropped and counted."""
    return Rejection(name, TOO_LONG, f"{name} has {tokens} tokens, the model holds {context_length}")


def _trajectory(record: Any, name: str, renderer: AnswerRenderer) -> Trajectory:
    if isinstance(record, Trajectory):
        transitions = record.transitions
    else:
        messages, tools = _conversation(record, name)
        transitions = tuple(renderer.transitions(messages, tools, name))
    if not any(call.prompt_token_ids or call.response_token_ids for call in transitions):
        raise DatasetError(f"{name} has no assistant turn to learn from; remove it from the dataset")
    return Trajectory(rollout_id=name, attempt_id="", transitions=tuple(_renamed(call, name) for call in transitions))


def _renamed(call: Transition, name: str) -> Transition:
    """The same call under this name: a rollout that is in a dataset twice is trained twice."""
    return Transition(
        rollout_id=name,
        attempt_id="",
        span_id=f"{name}/{call.sequence_id}",
        sequence_id=call.sequence_id,
        prompt_token_ids=call.prompt_token_ids,
        response_token_ids=call.response_token_ids,
        logprobs=(0.0,) * len(call.response_token_ids),
        agent=call.agent,
    )


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
class AnswerRenderer:
    """Puts the answers of conversations into tokens, and counts what deviates from the template."""

    chat: ChatFormat
    counts: Counter[str] = field(default_factory=Counter[str])

    def transitions(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, name: str
    ) -> Iterator[Transition]:
        """One transition for each assistant turn: the tokens before it as the prompt, its own as the response; its
        `sequence_id` is the place of the turn among the messages, from 1. `name` is what a DatasetError calls them."""
        chat, text, ids = self.chat, "", list[int]()
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, answer, end = self._text(messages[:position], message, tools, f"{name}: turn {position + 1}")
            more, follows = chat.encode_after(text, before[len(text) :]) if before.startswith(text) else ([], False)
            prompt = [*ids, *more] if text and follows else chat.encode(before)
            tokens, exact = self._encode(before, answer)
            agent = message.get("name")
            yield Transition(name, "", "", position + 1, tuple(prompt), (*tokens, *end), (), agent=agent)
            text, ids = (before + answer, prompt + tokens) if exact else ("", [])

    def turn(
        self, messages: Sequence[Message], answer: Message, tools: Sequence[dict[str, Any]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of a prompt and of its answer, with the token that ends the turn. Raises DatasetError where the
        chat template does not render the answer after its prompt."""
        before, text, end = self._text(messages, answer, tools, "the answer")
        return tuple(self.chat.encode(before)), (*self._encode(before, text)[0], *end)

    def _encode(self, before: str, answer: str) -> tuple[list[int], bool]:
        tokens, exact = self.chat.encode_after(before, answer)
        self._count("drift", not exact)
        return tokens, exact

    def _text(
        self, messages: Sequence[Message], answer: Message, tools: Sequence[dict[str, Any]] | None, name: str
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
        found = [at + len(end) for end in self._ends() if (at := answer_text.find(end)) >= 0]
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

    def _ends(self) -> list[str]:
        return [self.chat.decode([token]) for token in sorted(self.chat.eos_token_ids)]

    def _count(self, name: str, holds: bool) -> None:
        if not holds:
            return
        if not self.counts[name]:
            _logger.warning("some %s", NOTES[name])
        self.counts[name] += 1
