"""The generators of the package `reasoning-gym` as tasks, an agent that answers them, and their exact scorers.

    agl train --env "reasoning_gym:chain_sum?size=500&seed=1&max_terms=3" --model path/to/model

A task holds question and answer, and what its generator needs to make it again: scorers read the generated entry
itself, because some of them compare values that JSON cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final

import orjson

from agentlightning.errors import DatasetError, MissingExtraError, RewardError
from agentlightning.integrations.base import Address, chat, model_client

INSTRUCTION: Final = "Solve the problem. Give only the final answer between <answer> and </answer>."
ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ATTEMPTS: Final = 20
"""Generated questions for each one wanted, before a generator is said to have too few."""


def load(address: Address) -> list[Any]:
    """The tasks of an address, no question twice. Raises DatasetError if the generator is unknown, refuses an option,
    or has too few questions."""
    seed = address.number(address.name)
    options = orjson.dumps(address.options, option=orjson.OPT_SORT_KEYS).decode()
    generator = _generator(address.name, seed, options)
    tasks: dict[str, Any] = {}
    for index in range(ATTEMPTS * address.size):
        entry = generator[index]
        question = str(entry["question"])
        if question not in tasks and address.keeps(question):
            source = {"generator": address.name, "seed": seed, "index": index, "options": address.options}
            tasks[question] = {"question": question, "answer": entry["answer"], "reasoning_gym": source}
        if len(tasks) == address.size:
            return list(tasks.values())
    raise DatasetError(
        f"reasoning_gym:{address.name} has only {len(tasks)} different questions in {ATTEMPTS * address.size}, fewer"
        f" than size={address.size}; use a smaller size, or options that make it harder"
    )


def score(task: Mapping[str, Any], output: Any) -> float:
    """The reward of an answer, from 0 to 1, by the generator's own scorer. The answer is the last text between
    <answer> and </answer>, else all of it. Raises RewardError for a task that is not of this package."""
    source = task.get("reasoning_gym")
    if not isinstance(source, Mapping):
        raise RewardError("the task has no key 'reasoning_gym'; score takes tasks of reasoning_gym:NAME")
    options = orjson.dumps(source["options"], option=orjson.OPT_SORT_KEYS).decode()
    generator = _generator(source["generator"], source["seed"], options)
    entry = generator[source["index"]]
    if entry["question"] != task["question"]:
        raise RewardError(
            f"this version of reasoning-gym generates another question than {task['question']!r:.80};"
            " make the tasks anew"
        )
    text = "" if output is None else str(output)
    found = ANSWER.findall(text)
    return float(generator.score_answer(answer=(found[-1] if found else text).strip(), entry=entry))


async def play(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> str:
    """An agent that answers in one call."""
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": task["question"]}]
    async with model_client(base_url, api_key) as client:
        return await chat(client, model, messages)


@lru_cache(maxsize=64)
def _generator(name: str, seed: int, options: str) -> Any:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError("reasoning-gym", "reasoning-gym") from error
    known: Any = DATASETS
    if name not in known:
        near = get_close_matches(name, known, n=3) or sorted(known)[:3]
        raise DatasetError(
            f"reasoning_gym has no generator {name!r}; there are {len(known)}, such as {', '.join(near)}"
        )
    settings = orjson.loads(options)
    try:
        made: Any = reasoning_gym.create_dataset(name, size=2**31, seed=seed, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise DatasetError(f"reasoning_gym:{name} cannot be made with {settings}: {error}") from error
    return made
