"""Weights and rollouts of a run for other programs."""

from __future__ import annotations

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

from msgspec import Struct

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.chat.base import Message
from agentlightning.chat.messages import chat_messages
from agentlightning.errors import ConfigError, DatasetError, RewardError
from agentlightning.models import Precision
from agentlightning.rollouts import Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key
from agentlightning.tracing.rewards import find_final_reward
from agentlightning.training.persistence.run_dir import check_run, read_state, unfinished, write_atomically
from agentlightning.trajectory import RewardWeights, scalar_reward
from agentlightning.util.json_values import dumps, recorded_objects

# -- weights ---------------------------------------------------------------------------------------------------------

# The weights of a finished run as a directory or a file for other programs.
#
# hf          what transformers loads; an adapter is merged into the model below it
# gguf-ready  the same, checked for what llama.cpp's converter reads:
#                 python convert_hf_to_gguf.py DIRECTORY --outfile model.gguf
# gguf        one file that llama.cpp and Ollama load

WeightsForm = Literal["hf", "gguf-ready", "gguf"]
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Files of which llama.cpp's converter reads one."""


class ExportedWeights(Struct, frozen=True):
    """What was written."""

    path: Path
    files: tuple[str, ...]
    merged: bool
    """Whether an adapter was merged into the model below it."""


def export_weights(run_dir: Path, form: WeightsForm, path: Path, precision: Precision = "f16") -> ExportedWeights:
    """Write the weights of a finished run to a new directory, or to a GGUF file whose matrices have the `precision`.
    Raises ConfigError where there are none, where the directory has contents, and PolicyError for adapters that cannot
    be merged and models that cannot be written."""
    checkpoint = checkpoint_of(run_dir)
    if not holds_weights(checkpoint):
        prompts = checkpoint / "resources.json"
        raise ConfigError(f"{checkpoint} holds no weights: the run trained none; its prompts are in {prompts}")
    adapters, gguf = not (checkpoint / "config.json").exists(), form == "gguf"
    if not gguf and path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} has contents; give a directory that is new or empty")
    with TemporaryDirectory(prefix="agl-merged-") as folder:
        source = checkpoint
        if adapters:
            from agentlightning.models.lora import merge

            source = Path(folder) if gguf else path
            merge(checkpoint, source)
        if gguf:
            from agentlightning.models.gguf import write_gguf

            write_gguf(source, path, precision)
            return ExportedWeights(path, (path.name,), adapters)
    if not adapters:
        shutil.copytree(checkpoint, path, dirs_exist_ok=True)
    if form == "gguf-ready" and not any((path / name).exists() for name in TOKENIZERS):
        raise ConfigError(
            f"{path} has neither {' nor '.join(TOKENIZERS)}, of which llama.cpp's converter reads one; copy that of the"
            " model the run started from"
        )
    if form == "gguf-ready" and not list(path.glob("*.safetensors")):
        raise ConfigError(f"{path} has no *.safetensors, which llama.cpp's converter reads")
    return ExportedWeights(path, tuple(sorted(each.name for each in path.iterdir())), adapters)


def checkpoint_of(run_dir: Path) -> Path:
    """The result of a finished run. Raises ConfigError where there is none."""
    check_run(run_dir)
    if not (checkpoint := run_dir / "checkpoint").is_dir():
        raise ConfigError(f"there is no {checkpoint}: {unfinished(run_dir)}")
    return checkpoint


def holds_weights(checkpoint: Path) -> bool:
    """Whether a run has trained weights, and not only prompts."""
    return any((checkpoint / name).exists() for name in ("adapter_config.json", "agents.json", "config.json"))


# -- datasets --------------------------------------------------------------------------------------------------------

# The rollouts of a run as lines of JSON for other trainers.
#
#     openai-jsonl   {"messages": [...], "tools": [...]}                    fine-tuning of chat models at OpenAI
#     trl-jsonl      {"prompt": [...], "completion": [...]}                 TRL, conversational prompt-completion
#     dpo-jsonl      {"prompt": [...], "chosen": [...], "rejected": [...]}  TRL, conversational preference
#
# `tools` is there where the call had some. A conversation is the last of the calls that continue one another; a call
# whose history was rewritten begins another. A preference is made of the best and the worst rollout of one task that
# began with the same prompt and differ in reward.

DatasetForm = Literal["openai-jsonl", "trl-jsonl", "dpo-jsonl"]


class Selection(Struct, frozen=True):
    """Which conversations are exported."""

    min_reward: float | None = None
    """Only rollouts with at least this reward. None: also those without."""
    agent: str | None = None
    """A regular expression for the whole name of the agent. None: every agent."""
    reward_weights: RewardWeights = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.agent or "")
        except re.error as error:
            raise ConfigError(f"--agent {self.agent!r} is no regular expression: {error}") from error


class Conversation(Struct, frozen=True):
    """One conversation of a rollout."""

    task: Any
    reward: float | None
    messages: list[Message]
    """Its last message is the assistant's."""
    tools: list[Any]


class ExportedDataset(Struct, frozen=True):
    """What was written."""

    path: Path
    records: int
    rollouts: int
    """Training rollouts that succeeded."""
    skipped: Mapping[str, int] = {}
    """Rollouts, or for preferences tasks, that gave no record, by reason."""


async def export_dataset(
    run_dir: Path, form: DatasetForm, path: Path, selection: Selection, store: str | None = None
) -> ExportedDataset:
    """Write the training rollouts of a run that succeeded. `store`: that of the run, where it was given one.

    Raises ConfigError where there is no run or its rollouts are elsewhere, and DatasetError where nothing is left.
    """
    check_run(run_dir)
    run_id, own_store = read_state(run_dir).run_id, run_dir / "store.db"
    if store is None and not own_store.exists():
        raise ConfigError(
            f"{run_dir} has no store.db: its rollouts are in the store that the run was given; name it (--store)"
        )
    opened = LightningStore(store or own_store)
    try:
        rollouts = await opened.query_rollouts(status_in=["succeeded"], rollout_id_contains=f"{run_id}-")
        # Those of a prompt search are RUN-trial-000001-PROMPT-train00001-0.
        own = [each for each in rollouts if "-train" in each.rollout_id.removeprefix(run_id)]
        records, skipped = await dataset_records(opened, own, form, selection)
    finally:
        await opened.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"".join(dumps(each) + b"\n" for each in records))
    return ExportedDataset(path, len(records), len(own), skipped)


async def dataset_records(
    store: LightningStoreBase, rollouts: Sequence[Rollout], form: DatasetForm, selection: Selection
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(the records of some rollouts, those that gave none by reason). Raises DatasetError where nothing is left."""
    skipped: Counter[str] = Counter()
    tasks = {each.rollout_id: each.input for each in rollouts if each.status == "succeeded"}
    if len(tasks) < len(rollouts):
        skipped["that did not succeed"] = len(rollouts) - len(tasks)
    found: list[Conversation] = []
    async for rollout_id, spans in store.iter_spans(list(tasks), tokens=False):
        own = _of_rollout(tasks[rollout_id], spans, selection)
        if isinstance(own, str):
            skipped[own] += 1
        else:
            found += own
    if form == "dpo-jsonl":
        records = [*_preferences(found, skipped)]
    elif form == "openai-jsonl":
        records = [_with_tools(each, messages=each.messages) for each in found]
    else:
        records = [_with_tools(each, prompt=each.messages[:-1], completion=each.messages[-1:]) for each in found]
    if not records:
        counted = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "there are none"
        raise DatasetError(
            f"none of {len(rollouts)} rollouts gives a record of {form} ({counted}); choose others, or wider filters"
        )
    return records, dict(skipped)


def _of_rollout(task: Any, spans: Sequence[Span], selection: Selection) -> list[Conversation] | str:
    """The conversations of a rollout, or why there are none."""
    try:
        given = find_final_reward(spans)
    except RewardError as error:
        return f"with a reward that cannot be used: {error}"
    try:
        reward = scalar_reward(given, selection.reward_weights)
    except RewardError:
        dimensions = " and ".join(sorted(cast("dict[str, float]", given)))
        return f"with a reward of {dimensions}, without weights (--reward-weights)"
    if selection.min_reward is not None and (reward is None or reward < selection.min_reward):
        return "without a reward" if reward is None else "below the reward asked for"
    agent = re.compile("(?s).*" if selection.agent is None else selection.agent)
    chosen = [span for span in calls(spans) if agent.fullmatch(str(span.attributes.get(names.AGENT_NAME) or ""))]
    if not chosen:
        return "without a call of the agent" if selection.agent else "without a model call"
    whole = [(_history(span), span) for span in chosen]
    ends = [(messages, span) for place, (messages, span) in enumerate(whole) if not _continued(messages, whole[place:])]
    made = [
        Conversation(task, reward, messages, _tools(span))
        for messages, span in ends
        if len(messages) > 1 and messages[-1]["role"] == "assistant"
    ]
    return made or "without recorded messages"


def _history(span: Span) -> list[Message]:
    before, answer = (
        recorded_objects(span.attributes.get(key)) for key in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES)
    )
    return [*chat_messages(before), *chat_messages(answer)]


def _continued(messages: list[Message], later: Sequence[tuple[list[Message], Span]]) -> bool:
    return any(len(other) > len(messages) and other[: len(messages)] == messages for other, _ in later)


def _tools(span: Span) -> list[Any]:
    """In OpenAI's form."""
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        if "function" not in tool
        else tool
        for tool in recorded_objects(span.attributes.get(names.TOOL_DEFINITIONS))
    ]


def _with_tools(found: Conversation, **record: Any) -> dict[str, Any]:
    return {**record, "tools": found.tools} if found.tools else record


def _preferences(found: Sequence[Conversation], skipped: Counter[str]) -> Iterator[dict[str, Any]]:
    """The best and the worst conversation of each task and prompt."""
    groups: defaultdict[bytes, list[tuple[float, Conversation]]] = defaultdict(list)
    for each in found:
        if each.reward is None:
            skipped["without a reward"] += 1
        else:
            groups[dumps([task_key(each.task), _prompt(each)], default=repr)].append((each.reward, each))
    for group in groups.values():
        (high, best), (low, worst) = max(group, key=itemgetter(0)), min(group, key=itemgetter(0))
        if high == low:
            skipped["tasks whose rollouts have equal rewards"] += 1
            continue
        prompt = _prompt(best)
        chosen, rejected = (each.messages[len(prompt) :] for each in (best, worst))
        yield _with_tools(best, prompt=prompt, chosen=chosen, rejected=rejected)


def _prompt(found: Conversation) -> list[Message]:
    """The messages before the first of the assistant."""
    return [*takewhile(lambda message: message["role"] != "assistant", found.messages)]
