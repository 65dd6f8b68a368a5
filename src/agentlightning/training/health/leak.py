"""Whether the agent is shown the answer that its reward compares with. Pure.

An answer is the text in a field of the task that says so (`ANSWER_FIELDS`). It is given away where it stands as a word
in the prompt of the first call of a rollout and in no other field of the task: a passage or choices that hold it are
what the task is about. Answers of other tasks that stand in the same prompt are chance, or labels that the prompt
lists, and count against it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentlightning.training.health.sign import WINDOW, Records, Sign, mean_of
from agentlightning.trajectory import Trajectory
from agentlightning.util.json_values import dumps

ANSWER_FIELDS: Final = frozenset(
    {"answer", "answers", "expected", "expected_answer", "expected_output", "final_answer", "gold", "gold_answer"}
    | {"ground_truth", "label", "solution", "target", "correct_answer"}
)
LEAST_ANSWERS: Final = 3
"""Different answers in a batch: with fewer, one cannot be told from a label that every prompt lists."""
MOST_PROMPTS: Final = 16
"""Prompts that are read, of as many tasks."""
MOST_TEXT: Final = 8_000
"""Characters of a prompt that are read."""
LEAK_SHARE: Final = 0.5
"""The share of tasks from which on there is a sign."""


def answer_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`answers_in_prompt` of a batch, one rollout of each task; empty where tasks have no such field."""
    first = {each.group: each for each in reversed(trajectories) if each.transitions}
    pairs = [(each.task, each.transitions[0].input_messages or "") for each in list(first.values())[:MOST_PROMPTS]]
    share = answers_in_prompts(pairs)
    return {} if share is None else {"answers_in_prompt": share}


def answers_in_prompts(prompts: Sequence[tuple[Any, str]]) -> float | None:
    """The share of (task, prompt) whose answer the prompt gives away, less the share in which it holds the answer of
    another task. None: unknown, for tasks without an answer or with too few different ones.

    >>> tasks = [{"question": f"{number} squared", "answer": number**2} for number in (11, 12, 13)]
    >>> answers_in_prompts([(task, f"What is {task['question']}, {task['answer']}?") for task in tasks])
    1.0
    """
    known = [(answer, text[:MOST_TEXT]) for task, text in prompts if (answer := _answer(task)) is not None]
    different = {answer for answer, _ in known}
    if len(different) < LEAST_ANSWERS:
        return None
    own = sum(_holds(text, answer) for answer, text in known) / len(known)
    others = [_holds(text, other) for answer, text in known for other in different if other != answer]
    return max(0.0, own - sum(others) / len(others))


def _answer(task: Any) -> str | None:
    """The answer of a task; None where it has none, or another of its fields holds it, too."""
    if not isinstance(task, Mapping):
        return None
    fields = cast("Mapping[str, Any]", task)
    for name, value in fields.items():
        if str(name).lower() in ANSWER_FIELDS and isinstance(value, str | int | float) and str(value).strip():
            answer = str(value).strip()
            rest = {key: each for key, each in fields.items() if str(key).lower() not in ANSWER_FIELDS}
            return None if _holds(dumps(rest, default=repr).decode(), answer) else answer
    return None


def _holds(text: str, answer: str) -> bool:
    """Whether a text holds an answer as a word of its own, in any case."""
    written = re.escape(dumps(answer).decode()[1:-1])  # as it stands in JSON
    return re.search(rf"(?<![\w.]){written}(?![\w]|\.\d)", text, re.IGNORECASE) is not None


def answer_given_away(records: Records) -> Sign | None:
    """The prompts hold the answers."""
    share = mean_of(records[-WINDOW:], lambda record: record.answers_in_prompt)
    if not share >= LEAK_SHARE:  # NaN: unknown
        return None
    return Sign(
        "answer_in_prompt",
        f"the answer of the task is in the prompt of {share:.0%} of the tasks, and in no other field of these: the"
        " policy may learn to copy it",
        "do not give the agent the field of the task that the reward compares with; look at the first message of a"
        " rollout, and at the prompt template",
    )
