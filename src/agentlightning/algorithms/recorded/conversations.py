"""Conversations as trajectories: what an assistant wrote becomes sampled tokens.

A conversation is rendered by the model's own chat template, turn by turn, into the same tokens that the gateway would
have built while an agent had it. Where a template rewrites earlier turns, each answer follows the prompt it would
really have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentlightning.chat.base import ChatFormat, Message
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import DatasetError
from agentlightning.task import load_dataset
from agentlightning.trajectory import Trajectory, Transition

TOO_LONG: Final = "too_long"


def load_conversations(dataset: Any) -> Sequence[Any]:
    """The conversations of a list, a file, or a Hugging Face dataset. Raises DatasetError where there is none."""
    if isinstance(dataset, str | Path) or not isinstance(dataset, list | tuple):
        return load_dataset(dataset)
    dataset = cast("Sequence[Any]", dataset)
    if not dataset:
        raise DatasetError("the dataset holds no conversation; give at least one")
    return dataset


def to_trajectories(
    records: Sequence[Any], chat: ChatFormat, context_length: int, rejected: list[Rejection] | None = None
) -> list[Trajectory]:
    """Each record as a trajectory whose sampled tokens are the assistant's, without those that the model cannot hold,
    which are added to `rejected`. A DatasetError counts records from 1."""
    found: list[Trajectory] = []
    for number, record in enumerate(records, 1):
        made = _trajectory(record, f"conversation {number}", chat)
        longest = max(len(call.prompt_token_ids) + len(call.response_token_ids) for call in made.transitions)
        if longest <= context_length:
            found.append(made)
        elif rejected is not None:
            rejected.append(too_long(made.rollout_id, longest, context_length))
    return found


def too_long(name: str, tokens: int, context_length: int) -> Rejection:
    """A conversation that is dropped and counted."""
    return Rejection(name, TOO_LONG, f"{name} has {tokens} tokens, the model holds {context_length}")


def _trajectory(record: Any, name: str, chat: ChatFormat) -> Trajectory:
    if isinstance(record, Trajectory):
        transitions = record.transitions
    else:
        messages, tools = _conversation(record, name)
        transitions = tuple(message_transitions(messages, tools, chat, name))
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
    return cast("list[Message]", turns), tools


def message_transitions(
    messages: list[Message], tools: list[dict[str, Any]] | None, chat: ChatFormat, name: str
) -> Iterator[Transition]:
    """One transition for each assistant turn: the tokens before it as the prompt, its own as the response; its
    `sequence_id` is the place of the turn among the messages, from 1. `name` is what a DatasetError calls them."""
    ends = [chat.decode([token]) for token in sorted(chat.eos_token_ids)]
    text, ids = "", tuple[int, ...]()
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.render(messages[:position], tools, True)
        through = chat.render(messages[: position + 1], tools, False)
        if not through.startswith(before):
            raise DatasetError(f"{name}: the chat template does not render turn {position + 1} after its own prompt")
        if not before.startswith(text):
            text, ids = "", ()
        ids += tuple(chat.encode(before[len(text) :]))
        text = through[: _end_of_turn(through, len(before), ends)]
        answer = tuple(chat.encode(text[len(before) :]))
        speaker = message.get("name")
        agent = speaker if isinstance(speaker, str) else None
        yield Transition(name, "", "", position + 1, ids, answer, (), agent=agent)
        ids += answer


def render_turn(
    messages: Sequence[Message], answer: Message, tools: Sequence[dict[str, Any]], chat: ChatFormat
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of a prompt and of its answer, with the token that ends the turn. Raises DatasetError where the chat
    template does not render the answer after its prompt."""
    ends = [chat.decode([token]) for token in sorted(chat.eos_token_ids)]
    before = chat.render(list(messages), list(tools) or None, True)
    through = chat.render([*messages, answer], list(tools) or None, False)
    if not through.startswith(before):
        raise DatasetError("the chat template does not render the answer after its prompt")
    text = through[len(before) : _end_of_turn(through, len(before), ends)]
    return tuple(chat.encode(before)), tuple(chat.encode(text))


def _end_of_turn(text: str, start: int, ends: Sequence[str]) -> int:
    """The end of the answer that begins at `start`: after its last end-of-turn token, or the end of the text."""
    found = [at + len(end) for end in ends if (at := text.rfind(end, start)) >= 0]
    return max(found, default=len(text))
