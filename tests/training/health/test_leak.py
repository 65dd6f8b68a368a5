"""An answer that the prompt gives away is found; answers that belong in a prompt are not."""

from __future__ import annotations

import json
from typing import Any

from agentlightning.training.health.step_record import answers_in_prompts, batch_metrics
from agentlightning.trajectory import Trajectory, Transition


def message(text: str) -> str:
    return json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}], ensure_ascii=False)


def trajectory(number: int, task: Any, prompt: str) -> Trajectory:
    call = Transition("r", "a", "s", 1, (1, 2), (3,), (-0.1,), input_messages=message(prompt))
    return Trajectory(f"r{number}", "a", (call,), 1.0, f"g{number // 2}", task=task)


def share(tasks: list[dict[str, Any]], prompt: Any) -> float | None:
    """As a batch of two rollouts of each task."""
    rollouts = [trajectory(2 * n + k, task, prompt(task)) for n, task in enumerate(tasks) for k in range(2)]
    return batch_metrics(rollouts).get("answers_in_prompt")


SUMS = [{"question": f"{a} + {a + 4}", "answer": 2 * a + 4} for a in (11, 25, 39, 53)]
MOODS = [{"text": text, "label": label} for text, label in (("good", "joy"), ("bad", "anger"), ("ah", "surprise"))]


def test_an_answer_in_the_prompt_is_found() -> None:
    assert share(SUMS, lambda task: f"What is {task['question']}? (It is {task['answer']}.)") == 1.0
    assert share(SUMS, json.dumps) == 1.0, "the whole task is given to the model"
    quoted = [{"q": n, "expected": f'say "{word}" ü'} for n, word in enumerate(("a", "b", "c"))]
    assert share(quoted, lambda task: f"reply with {task['expected']}") == 1.0


def test_a_question_without_its_answer_is_none() -> None:
    assert share(SUMS, lambda task: f"What is {task['question']}?") == 0.0
    assert share(SUMS, lambda task: f"What is {task['question']}? 1{task['answer']}9") == 0.0, "a part of a number"


def test_labels_that_every_prompt_lists_are_none() -> None:
    assert share(MOODS, lambda task: f"Is this joy, anger or surprise: {task['text']}") == 0.0


def test_a_passage_or_choices_of_the_task_may_hold_the_answer() -> None:
    tasks = [
        {"passage": f"It happened in {year}.", "question": "When?", "answer": str(year)} for year in range(1900, 1905)
    ]
    assert share(tasks, lambda task: task["passage"] + task["question"]) is None


def test_tasks_without_an_answer_or_with_too_few_are_unknown() -> None:
    assert share([{"question": "a"}, {"question": "b"}, {"question": "c"}], str) is None
    assert share([{"label": "yes"}, {"label": "no"}] * 4, str) is None
    assert answers_in_prompts([("text", "prompt")] * 4) is None
