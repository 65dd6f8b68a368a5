"""What a rollout says: its values as text, its model calls as a conversation, its line in a table, its lines in a
terminal, and what sums up attempts of any length."""

from __future__ import annotations

import asyncio
import math
import re
import time
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeAlias, TypeVar

import orjson
from msgspec import structs

from agentlightning import span as names
from agentlightning.assemble import calls, has_failed, is_call, link_rewards, steps
from agentlightning.errors import RewardError
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key
from agentlightning.tracing.rewards import get_reward_value
from agentlightning.trajectory import Reward, RewardWeights, scalar_reward
from agentlightning.util.json_values import Json, as_text, is_list, is_table, loads, recorded_objects

K = TypeVar("K")
SHORT = 240
"""Characters of a value in a table."""
LONG = 100_000
"""Characters of one value on a page."""
FAILED = re.compile(r"\s*[\[({\"']*\s*(error|exception|traceback|failed)\b", re.IGNORECASE)


def shortened(value: Any) -> str:
    """The value on one line."""
    line = " ".join(as_text(value)[: 4 * SHORT].split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"


def limited(value: Any, limit: int = LONG) -> str:
    """The value as text that may be cut, which it then says."""
    text = as_text(value)
    return text if len(text) <= limit else f"{text[:limit]}\n[… {len(text) - limit} more characters]"


def tells_failure(result: Any) -> bool:
    """Whether the result of a tool says that the tool has failed: it begins with "error", "exception", "traceback" or
    "failed", or is an object with a field `error` that is not empty.

    >>> tells_failure("error: division by zero"), tells_failure('{"error": null, "rows": 3}'), tells_failure("42")
    (True, False, False)
    """
    try:
        value = loads(result) if isinstance(result, str) else result
    except orjson.JSONDecodeError:
        value = result
    if isinstance(value, dict) and "error" in value:
        return bool(value["error"])
    return isinstance(value, str) and FAILED.match(value) is not None


# -- messages ----------------------------------------------------------------------------------------------------------


Message = Json
IMAGE = ("data:image/png;", "data:image/jpeg;", "data:image/gif;", "data:image/webp;")
"""What is shown as an image: nothing is loaded from elsewhere, and no SVG, which may hold a script."""
MOST_IMAGE = 4_000_000


def messages_of(span: Span, attribute: str) -> list[Message]:
    """The messages in an attribute; those that cannot be read are left out."""
    return recorded_objects(span.attributes.get(attribute))


def parts_of(message: Message) -> list[Json]:
    if is_list(parts := message.get("parts")):
        return list(filter(is_table, parts))
    content = message.get("content")
    return [] if content is None else [{"type": "text", "content": content}]


def tool_results(messages: Iterable[Message]) -> list[Any]:
    """The results of tools among messages, in order."""
    return [
        part.get("response", part.get("result"))
        for message in messages
        for part in parts_of(message)
        if part.get("type") == "tool_call_response"
    ]


def message_json(message: Message) -> Json:
    """A message for the page: its role and parts of kinds text, reasoning, tool_call, tool_result, image and other."""
    return {"role": str(message.get("role", "?"))[:40], "parts": [_part(each) for each in parts_of(message)]}


def _part(part: Json) -> Json:
    kind = str(part.get("type", ""))
    if kind == "tool_call":
        name, text = str(part.get("name")), limited(part.get("arguments"))
        return {"kind": "tool_call", "name": name, "text": text, "id": part.get("id")}
    if kind == "tool_call_response":
        result = part.get("response", part.get("result"))
        failed = tells_failure(result)
        return {"kind": "tool_result", "text": limited(result), "failed": failed, "id": part.get("id")}
    if (address := _image(part)) is not None:
        return address
    content = part.get("content")
    if content is None:
        return {"kind": "other", "type": kind, "text": limited(part)}
    return {"kind": "reasoning" if kind == "reasoning" else "text", "text": limited(content)}


def _image(part: Json) -> Json | None:
    kind, nested = part.get("type"), part.get("image_url")
    of_image = kind in ("blob", "uri") and part.get("modality", "") in ("", "image")
    if not of_image and kind not in ("image", "image_url"):
        return None
    url = part.get("uri") or part.get("url") or (nested.get("url") if isinstance(nested, dict) else nested)
    if kind == "blob" and isinstance(part.get("content"), str):
        url = f"data:{part.get('mime_type') or 'image/png'};base64,{part['content']}"
    text = url if isinstance(url, str) else as_text(part)
    shown = text.startswith(IMAGE) and len(text) <= MOST_IMAGE
    return {"kind": "image", "source": text if shown else None, "text": "" if shown else text[:500]}


# -- a line of a table ------------------------------------------------------------------------------------------------


SUMMARIES = 20_000
"""Finished rollouts whose summaries are remembered."""


Updates: TypeAlias = Callable[[int], int]
"""The number of updates behind weights of a version. Pages show it: loading a checkpoint raises the version too."""


class RolloutSummary:
    """A line of the table of rollouts: a rollout, from the spans of its latest attempt. None: they were not read."""

    def __init__(
        self, rollout: Rollout, attempt: Attempt | None, spans: Sequence[Span] | None, weights: RewardWeights = None
    ) -> None:
        self.spans_read = attempt is None or spans is not None
        """False: what they say is not known."""
        spans = spans or ()
        answered = calls(spans)
        self.rollout_id = rollout.rollout_id
        self.status = rollout.status
        self.mode = rollout.mode
        self.queue = rollout.queue
        self.group = group_of(rollout)
        self.resources_id = rollout.resources_id
        self.task = shortened(rollout.input)
        """Its beginning."""
        self.task_key = digest_of(rollout.input)
        self.start_time = rollout.start_time
        self.end_time = rollout.end_time
        self.attempts = 0 if attempt is None else attempt.sequence_id
        self.attempt_start = attempt and attempt.start_time
        self.worker = attempt and attempt.worker_id
        self.seconds = attempt and attempt.end_time and attempt.end_time - attempt.start_time
        """Of the latest attempt."""
        self.reward: Reward | None = None
        self.failure_kind, self.failure = _failure(attempt)
        """The type of the error, or how the attempt ended; and why it failed, or why it has no reward."""
        try:
            self.reward = link_rewards(spans).final
        except RewardError as error:
            if rollout.status != "failed":
                self.failure_kind, self.failure = None, str(error)
        self.reward_number = number_of(self.reward, weights)
        """The reward as one number; None: missing, or named dimensions without weights."""
        self.calls = len(answered)
        self.prompt_tokens = sum(map(prompt_tokens, answered))
        self.sampled_tokens = sum(map(sampled_tokens, answered))
        self.agents = _texts(answered, names.AGENT_NAME)
        self.versions = tuple(dict.fromkeys(v for span in answered if (v := version_of(span)) is not None))
        """Of the weights that answered, in order."""
        self.tool_calls, self.tool_errors = _tools(spans, answered)
        self.labels = _texts(spans, names.FEEDBACK_LABEL)
        """What people have said of it."""

    def counted(self, updates: Updates) -> RolloutSummary:
        """With updates in place of versions."""
        found = copy(self)
        found.versions = tuple(map(updates, self.versions))
        return found


class Summaries:
    """Reads summaries, and remembers those of finished rollouts."""

    def __init__(self, store: LightningStoreBase, weights: RewardWeights = None, updates: Updates = int) -> None:
        self._store, self._weights, self.updates = store, weights, updates
        self._known = OrderedDict[tuple[str, float | None, str], RolloutSummary]()

    def forget(self, rollouts: Iterable[Rollout]) -> None:
        """Read those again that may have been annotated."""
        for each in rollouts:
            self._known.pop(_key(each), None)

    async def of(self, rollouts: Sequence[Rollout], *, open_spans: bool = True) -> list[RolloutSummary]:
        """In the given order. Without `open_spans`, no spans are read of rollouts that are not finished."""
        found = {each.rollout_id: row for each in rollouts if (row := self._known.get(_key(each))) is not None}
        missing = {each.rollout_id: each for each in rollouts if each.rollout_id not in found}
        latest = await self._store.get_latest_attempts([*missing]) if missing else []
        attempts = {each.rollout_id: each for each in latest}
        found |= {name: RolloutSummary(each, attempts.get(name), None) for name, each in missing.items()}
        wanted = [name for name, each in missing.items() if name in attempts and (open_spans or each.finished)]
        if wanted:
            async for name, spans in self._store.iter_spans(wanted, tokens=False):
                found[name] = RolloutSummary(missing[name], attempts[name], spans, self._weights)
        self._known |= {_key(each): found[name] for name, each in missing.items() if each.finished}
        while len(self._known) > SUMMARIES:
            self._known.popitem(last=False)
        return [found[each.rollout_id].counted(self.updates) for each in rollouts]


def _key(rollout: Rollout) -> tuple[str, float | None, str]:
    return rollout.rollout_id, rollout.end_time, rollout.status


def _texts(spans: Iterable[Span], attribute: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(value) for span in spans if (value := span.attributes.get(attribute))))


def grouped(rows: Iterable[RolloutSummary], key: Callable[[RolloutSummary], K]) -> dict[K, list[RolloutSummary]]:
    """The rows by key, in the order of the first of each."""
    found: dict[K, list[RolloutSummary]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def group_of(rollout: Rollout) -> str:
    """The group that a rollout says it belongs to; empty where it says none."""
    group = rollout.metadata.get("group")
    return group if isinstance(group, str) else ""


def number_of(reward: Reward | None, weights: RewardWeights) -> float | None:
    """A reward as one number: a single named dimension as it is, several by their weights."""
    if isinstance(reward, dict) and not weights:
        return next(iter(reward.values())) if len(reward) == 1 else None
    try:
        return scalar_reward(reward, weights)
    except RewardError:
        return None


def _token_count(ids: str, usage: str, span: Span) -> int:
    known, number = (span.attributes.get(name) for name in (ids, usage))
    return len(known) if is_list(known) else number if isinstance(number, int) else 0


prompt_tokens = partial(_token_count, names.PROMPT_TOKEN_IDS, names.INPUT_TOKENS)
sampled_tokens = partial(_token_count, names.RESPONSE_TOKEN_IDS, names.OUTPUT_TOKENS)


def version_of(span: Span, updates: Updates = int) -> int | None:
    version = span.attributes.get(names.POLICY_VERSION)
    return updates(version) if isinstance(version, int) else None


def call_facts(span: Span, updates: Updates) -> Json:
    """Who made a model call, what answered it, and what it cost."""
    attributes = span.attributes
    return {
        "span_id": span.span_id,
        "agent": attributes.get(names.AGENT_NAME),
        "model": attributes.get(names.RESPONSE_MODEL) or attributes.get(names.REQUEST_MODEL),
        "version": version_of(span, updates),
        "seconds": None if span.end_time is None else span.end_time - span.start_time,
        "prompt_tokens": prompt_tokens(span),
        "sampled_tokens": sampled_tokens(span),
        "failed": has_failed(span),
    }


def digest_of(task: Any) -> str:
    """The key of a task; empty where it has none."""
    try:
        return task_key(task)
    except TypeError:
        return ""


def _tools(spans: Sequence[Span], answered: Sequence[Span]) -> tuple[int, int]:
    """Tool calls and those that went wrong: by their spans, else by the results that later requests show."""
    own = [step for step in steps(spans) if step.kind == "tool"]
    if own:
        return len(own), sum(step.error is not None or tells_failure(step.result) for step in own)
    seen = (tool_results(messages_of(span, names.INPUT_MESSAGES)) for span in answered)
    longest = max(seen, key=len, default=[])
    return len(longest), sum(map(tells_failure, longest))


def _failure(attempt: Attempt | None) -> tuple[str | None, str | None]:
    if attempt is None or attempt.status == "succeeded":
        return None, None
    error: Any = attempt.metadata.get("error")
    if not isinstance(error, dict):
        return (None, None) if attempt.status in ("preparing", "running") else (attempt.status, None)
    return str(error.get("type") or attempt.status), shortened(error.get("message") or "")


# -- a rollout as text ------------------------------------------------------------------------------------------------


def rollout_lines(rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]) -> Iterator[str]:
    """The rollout, then each attempt with its spans in order."""
    mode = f", {rollout.mode}" if rollout.mode else ""
    yield f"{rollout.rollout_id} {rollout.status}{mode}"
    yield f"  task     {shortened(rollout.input)}"
    if command := rollout.metadata.get("command"):
        yield f"  command  {shortened(command)}"
    for attempt in attempts:
        took = "" if attempt.end_time is None else f" in {attempt.end_time - attempt.start_time:.1f} s"
        yield f"attempt {attempt.sequence_id} {attempt.attempt_id} {attempt.status}{took}"
        error: Any = attempt.metadata.get("error")
        if isinstance(error, dict):
            yield f"  error    {shortened(error.get('message'))}"
        for span in spans:
            if span.attempt_id == attempt.attempt_id:
                yield from _span(span)


def _span(span: Span) -> Iterator[str]:
    values = span.attributes
    number = f"  {span.sequence_id:>3}"
    if names.OPERATION_NAME in values and names.REQUEST_MODEL in values:
        yield from _call(span, number)
    elif (reward := get_reward_value(span)) is not None:
        yield f"{number} reward {reward}"
    elif names.MESSAGE_BODY in values:
        yield f"{number} {shortened(values[names.MESSAGE_BODY])}"
    elif names.EXCEPTION_MESSAGE in values:
        yield f"{number} {values.get(names.EXCEPTION_TYPE)}: {shortened(values[names.EXCEPTION_MESSAGE])}"
    else:
        yield f"{number} {span.name}"


def _call(span: Span, number: str) -> Iterator[str]:
    facts, dollars = call_facts(span, int), span.attributes.get(names.COST)
    agent = f", {facts['agent']}" if facts["agent"] is not None else ""
    cost = f", ${dollars:.4f}" if isinstance(dollars, int | float) else ""
    yield f"{number} {span.name}{agent}: {facts['prompt_tokens']} tokens in, {facts['sampled_tokens']} out{cost}"
    inputs, outputs = (messages_of(span, name) for name in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES))
    yield from (f"        {line}" for message in (*inputs[-1:], *outputs) for line in _message(message_json(message)))
    if span.status_code == "ERROR":
        yield f"        failed: {shortened(span.status_message or span.attributes.get(names.ERROR_TYPE))}"


def _message(message: Json) -> Iterator[str]:
    for part in message["parts"]:
        note, text = " (thinks)" if part["kind"] == "reasoning" else "", shortened(part["text"])
        said = f"{part['name']}({text})" if part["kind"] == "tool_call" else text or part["kind"]
        yield f"{message['role']:<10}{note} {said}"


# -- what an attempt holds --------------------------------------------------------------------------------------------
#
# A page shows some hundreds of spans; its totals are those of all. They are read once, without tokens, in chunks and in
# the background, and later only what was added. The number of spans, which the store keeps, says whether that is
# needed.


CHUNK = 10_000
"""Spans that are read at once."""
BUCKETS = 100
REMEMBERED = 8
MOST_REMEMBERED = 300_000
"""Attempts whose index is kept, and spans of all of them; that of the last one is kept however large it is."""
REST = 20
"""Totals of an attempt that grows are computed again after so many times the time that they took."""
CONTEXT_SPANS = 500
"""Spans before a page that are read again at most, so that its calls are shown as what they continue."""
LARGE = frozenset({names.INPUT_MESSAGES, names.OUTPUT_MESSAGES, names.TOP_LOGPROBS, names.KEPT_SETS})
"""Attributes of calls that totals do not need."""
Key = tuple[str, str]
"""(rollout_id, attempt_id)"""


def kind_of(span: Span) -> str:
    """What a span is, for its colour: model, tool, reward, error or operation."""
    if span.name == names.REWARD:
        return "reward"
    if span.name == names.EXCEPTION or span.status_code == "ERROR":
        return "error"
    if span.attributes.get(names.OPERATION_NAME) == "execute_tool":
        return "tool"
    if names.REQUEST_MODEL in span.attributes or names.INPUT_MESSAGES in span.attributes:
        return "model"
    return "operation"


class AttemptIndex:
    """The index of one attempt."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        """Of its spans, in order."""
        self.calls: list[int] = []
        """Places of the model calls among them, failed ones included."""
        self.kinds = Counter[str]()
        self.start, self.end = math.inf, -math.inf
        """Infinite without spans, which is null in JSON."""
        self.starts = array("d")
        self.kept: list[Span] = []
        """The spans that a summary is made of, without messages: all but operations."""
        self._totals: tuple[Any, int, RolloutSummary, list[int]] | None = None
        """What was computed of them last, after what it depends on."""
        self._totals_until = 0.0
        self._longest: tuple[int, int, Span] | None = None
        """The call with the longest request, whose messages are needed: its length, the place in `kept`, the span."""

    def add(self, spans: Sequence[Span]) -> AttemptIndex:
        """Add the spans that follow; returns itself."""
        for span in spans:
            kind = kind_of(span)
            self.kinds[kind] += 1
            self.start = min(self.start, span.start_time)
            self.end = max(self.end, span.start_time if span.end_time is None else span.end_time)
            if is_call(span) or kind != "operation" or names.FEEDBACK_LABEL in span.attributes:
                self.kept.append(_without_messages(span))
            if is_call(span):
                self.calls.append(len(self.ids))
                size = len(str(span.attributes.get(names.INPUT_MESSAGES)))
                if self._longest is None or size > self._longest[0]:
                    self._longest = size, len(self.kept) - 1, span
            self.ids.append(span.span_id)
            self.starts.append(span.start_time)
        return self

    async def totals(
        self, rollout: Rollout, attempt: Attempt | None, weights: RewardWeights
    ) -> tuple[RolloutSummary, list[int], bool]:
        """The summary of the attempt, how many of its spans start in each of BUCKETS equal parts of its time, and
        whether both are up to date: while spans are added, they take at most a share of the time."""
        state = rollout.status, rollout.end_time, attempt and (attempt.status, attempt.end_time)
        known, count, began = self._totals, len(self.ids), time.monotonic()
        if known is None or known[0] != state or (known[1] != count and began >= self._totals_until):
            longest, spans = self._longest, list(self.kept)  # in this order: spans are added in another thread
            if longest is not None:
                _, place, spans[place] = longest
            found = await asyncio.to_thread(lambda: (RolloutSummary(rollout, attempt, spans, weights), self._density()))
            known = self._totals = state, count, *found
            self._totals_until = time.monotonic() + REST * (time.monotonic() - began)
        return known[2], known[3], known[1] == count

    def _density(self) -> list[int]:
        scale = (BUCKETS - 1e-9) / (self.end - self.start) if self.end > self.start else 0.0
        found = Counter(int((each - self.start) * scale) for each in tuple(self.starts))
        return [found[bucket] for bucket in range(BUCKETS)]

    def start_of(self, place: int, context: int) -> tuple[str | None, int]:
        """Where to read a page from that begins at a place, with up to `context` calls before it that it may continue:
        the span to read after (None: from the first one), and the number of spans from there to the page."""
        place = min(place, len(self.ids))
        number = bisect_left(self.calls, place)
        first = self.calls[max(0, number - context)] if number else place
        first = max(first, place - CONTEXT_SPANS)
        return self.ids[first - 1] if first else None, place - first


def _without_messages(span: Span) -> Span:
    kept = {name: value for name, value in span.attributes.items() if name not in LARGE}
    return structs.replace(span, attributes=kept)


class AttemptIndexes:
    """Reads indexes of the attempts of a store, and remembers the last ones."""

    def __init__(self, store: LightningStoreBase) -> None:
        self._store = store
        self._known = OrderedDict[Key, AttemptIndex]()
        self._tasks = dict[Key, asyncio.Task[AttemptIndex]]()

    async def of(self, key: Key, count: int, seconds: float | None = None) -> AttemptIndex | None:
        """The index of an attempt that has `count` spans. None: it is not complete after `seconds`, and is read on
        meanwhile."""
        known = self._known.get(key)
        if known is not None and len(known.ids) == count:
            self._known.move_to_end(key)
            return known
        earlier = self._tasks.get(key)
        task = self._tasks[key] = earlier or asyncio.create_task(self._read(key, count))
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            return None
        index = task.result()
        if earlier is not None and len(index.ids) < count:  # it began before the last spans were stored
            return await self.of(key, count, seconds)
        return index

    async def _read(self, key: Key, count: int) -> AttemptIndex:
        """All the first time, and where a span was stored between others; else what was added."""
        try:
            index = self._known.get(key)
            if index is None or len(index.ids) > count or len((await self._extend(index, key)).ids) < count:
                index = await self._extend(AttemptIndex(), key)
        finally:
            del self._tasks[key]
        known = self._known
        known[key] = index
        while len(known) > REMEMBERED or (len(known) > 1 and sum(len(e.ids) for e in known.values()) > MOST_REMEMBERED):
            known.popitem(last=False)
        return index

    async def _extend(self, index: AttemptIndex, key: Key) -> AttemptIndex:
        while True:
            after = index.ids[-1] if index.ids else None
            spans = await self._store.query_spans(*key, after=after, limit=CHUNK, tokens=False)
            await asyncio.to_thread(index.add, spans)  # the gateway of the same server is not to wait
            if len(spans) < CHUNK:
                return index

    async def close(self) -> None:
        """Stop reading."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
