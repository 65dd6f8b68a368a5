"""The table of attempts that make calls: their LLM resources, mode and trace.

An attempt is read from the store at its first call. From then on a watch keeps the table true, so that a call reads
nothing: every `check_seconds` it asks the store, in few queries, which attempts still run. One that has ended is
forgotten, and its calls in progress end with 409: an agent that was killed at its time limit may leave a call behind,
since a proxy keeps the connection open, and the provider or the engine would continue in vain.

So an attempt takes calls for at most `check_seconds` after its end, and the time of one check. While the store is slow
or away, calls rely on what it said for 2.5 times as long; after that, each call asks the store itself, and fails if
that does. Calls in progress continue then. The watch leaves out attempts that made no call for `idle_seconds`; the next
call of such an attempt asks the store.

An attempt that branches off another one is given the recorded answers of the calls before the branch, token for token,
and, where it branches inside an answer, the beginning of that one. A request is answered from the record if its prompt
is that of a recorded call. The first one that is not ends the replay: from there on, everything is sampled. So an agent
that does something else this time is served as any other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning import span as names
from agentlightning.attempt_address import attempt_trace_id
from agentlightning.engine.base import FinishReason, Sample, SamplingParams
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.errors import StoreError
from agentlightning.gateway.errors import ApiError, conflict
from agentlightning.resources import LLM
from agentlightning.rollouts import BRANCH, Attempt, Rollout, RolloutMode
from agentlightning.span import SUPERSEDED, TURN_LIMIT_REACHED, Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.util.json_values import loads
from agentlightning.util.kept_sets import KeptSets

logger = logging.getLogger(__name__)

AttemptIds = tuple[str, str]
"""(rollout_id, attempt_id)."""

CHECK_SECONDS: Final = 2.0
"""Seconds between two checks of the table."""
_TRUSTED_CHECKS: Final = 2.5
"""For how many times as long an attempt counts as running after the store said so."""
IDLE_SECONDS: Final = 3600.0
"""Without a call for so long, an attempt is not watched."""
_ATTEMPTS_PER_QUERY: Final = 256


# -- recorded answers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """An answer of another rollout, or its beginning."""

    model: str
    prompt: tuple[int, ...]
    begun: tuple[int, ...]
    """The tokens that the sample goes on from, after the prompt."""
    sample: Sample | None
    """None: the rest is to be sampled."""
    replays: list[str] | None = None
    """rollout_id and span_id of a whole answer, as it was sampled."""
    call_ids: tuple[str, ...] = ()
    """Of its tool calls."""

    @classmethod
    def of(cls, span: Span, beginning: int | None = None) -> RecordedAnswer:
        """`beginning`: only so many tokens of it are given again."""
        found = span.attributes
        tokens = tuple(found[names.RESPONSE_TOKEN_IDS])
        reason: FinishReason = "length" if "length" in found.get(names.FINISH_REASONS, ()) else "stop"
        kept, top = found.get(names.KEPT_SETS), found.get(names.TOP_LOGPROBS)
        versions: Sequence[int] = found.get(names.POLICY_VERSIONS, ())
        sample = Sample(
            tokens,
            tuple(found[names.LOGPROBS]),
            reason,
            found[names.POLICY_VERSION],
            tuple(zip(versions[::2], versions[1::2], strict=True)),
            top_logprobs=() if top is None else tuple(likeliest_from_text(top, len(tokens))),
            kept_sets=None if kept is None else KeptSets.from_text(kept, len(tokens)),
        )
        before = tuple(found[names.PROMPT_TOKEN_IDS])
        place = len(before) - found.get(names.BEGUN, 0)
        prompt, begun = before[:place], before[place:]
        model = found[names.RESPONSE_MODEL]
        if beginning is not None:
            return cls(model, prompt, begun + tokens[:beginning], None)
        replays = [*found.get(names.REPLAYS, (span.rollout_id, span.span_id))]
        return cls(model, prompt, begun, sample, replays, _call_ids(found))


@dataclass(slots=True)
class Replay:
    """The recorded answers that an attempt has not been given yet, in their order."""

    left: list[RecordedAnswer] = field(default_factory=list[RecordedAnswer])

    def take(
        self, model: str, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> tuple[RecordedAnswer | None, bool]:
        """(the answer to a request, whether the request is the first one that has no recorded answer). One that asks
        for likeliest tokens is sampled, since the record may have none; and so is the whole of an answer that a grammar
        describes."""
        if not self.left:
            return None, False
        if len(prompts) == n == 1 and not params.top_logprobs:
            for answer in self.left:
                if answer.model == model and answer.prompt == tuple(prompts[0]):
                    self.left.remove(answer)
                    if answer.sample is None and params.constraint is not None:
                        break
                    return answer, False
        self.left.clear()
        return None, True


async def load_replay(store: LightningStoreBase, branch: Any) -> Replay:
    """What is recorded of the calls that a rollout's metadata names under `BRANCH`; those that are gone are sampled.
    Anything else there is of the user's own."""
    if not isinstance(branch, dict) or not branch.keys() >= {"rollout_id", "span_ids"}:
        return Replay()
    spans = {span.span_id: span for span in await store.query_spans(branch["rollout_id"])}
    wanted = [(span_id, None) for span_id in branch["span_ids"]] + [*branch.get("kept", {}).items()]
    return Replay([RecordedAnswer.of(spans[span_id], beginning) for span_id, beginning in wanted if span_id in spans])


def _call_ids(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    messages: Any = loads(attributes[names.OUTPUT_MESSAGES])
    return tuple(part["id"] for message in messages for part in message["parts"] if part["type"] == "tool_call")


@dataclass(slots=True, eq=False)
class AttemptContext:
    """What a call needs to know of its attempt."""

    rollout_id: str
    attempt_id: str
    llms: dict[str, tuple[str, LLM]] = field(default_factory=dict[str, tuple[str, LLM]])
    """model -> (name of the resource, the resource)."""
    names_resources: bool = False
    """Whether the rollout names its resources, as those of training runs do; others get the latest."""
    trace_id: str = ""
    mode: RolloutMode | None = None
    """The mode of the rollout."""
    replay: Replay = field(default_factory=Replay)
    """The answers of another rollout that it is given."""
    answered: int = 0
    """Calls of the policy that were answered or are being answered."""
    worker_id: str | None = None
    """The worker that runs it."""
    checked_at: float = -math.inf
    """When the store last said that the attempt is running (monotonic seconds)."""
    called_at: float = 0.0
    """When the last call began."""
    ended: ApiError | None = None
    """Why the attempt takes no more calls."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """The calls in progress."""

    @property
    def trainable(self) -> bool:
        """Whether its calls may serve as training data; false in the modes val and test."""
        return self.mode not in ("val", "test")

    @property
    def given(self) -> Mapping[str, tuple[str, LLM]]:
        """The `llms` that the rollout itself names."""
        return self.llms if self.names_resources else {}

    def sampling_parameters(self, model: str) -> tuple[str, dict[str, Any]]:
        """(name of the resource, its sampling parameters) of the LLM resource of a model; empty if there is none."""
        name, llm = self.llms.get(model, ("", None))
        return (name, llm.sampling_parameters) if llm else ("", {})

    def begin_turn(self, model: str) -> int | None:
        """Count a call of the policy; returns the limit on them, None where there is none. Raises ApiError 409 if it
        has been reached."""
        _, llm = self.llms.get(model, ("", None))
        if llm is None or llm.max_calls is None:
            return None
        if self.answered >= llm.max_calls:
            message = (
                f"the rollout {self.rollout_id!r} has been given the {llm.max_calls} answers that it may have"
                " (runner.max_calls, or curriculum.turns); it ends here"
            )
            raise conflict(TURN_LIMIT_REACHED, message)
        self.answered += 1
        return llm.max_calls

    def undo_turn(self) -> None:
        """A counted call was not answered."""
        self.answered -= 1


class AttemptTable:
    """The attempts that made calls and still run, as far as the store said. Beyond `limit`, those whose last call is
    longest ago leave the table. `forget(rollout_id, attempt_id)` is called for each attempt that has ended."""

    def __init__(
        self,
        store: LightningStoreBase,
        forget: Callable[[str, str], object],
        *,
        check_seconds: float = CHECK_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
        limit: int = 16384,
    ) -> None:
        self.store = store
        self._forget, self._limit = forget, limit
        self._check_seconds, self._idle_seconds = check_seconds, idle_seconds
        self._contexts: OrderedDict[str, AttemptContext] = OrderedDict()
        """By attempt_id."""
        self._loading: dict[AttemptIds, asyncio.Task[AttemptContext]] = {}
        self._watcher: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._contexts)

    async def get(self, attempt: AttemptIds) -> AttemptContext:
        """The context of an attempt that runs. Concurrent callers share one query.

        Raises ApiError 404 for unknown ids, 409 if the attempt has ended or was superseded.
        """
        context, now = self._contexts.get(attempt[1]), time.monotonic()
        trusted = now - self._check_seconds * _TRUSTED_CHECKS
        if context is not None and context.rollout_id == attempt[0] and context.checked_at > trusted:
            self._contexts.move_to_end(attempt[1])
            context.called_at = now
            return context
        if (loading := self._loading.get(attempt)) is None:
            loading = self._loading[attempt] = asyncio.create_task(self._load(*attempt))
            loading.add_done_callback(lambda _: self._loading.pop(attempt))
        # A client that disconnects must not cancel it for the others.
        return await asyncio.shield(loading)

    async def find(self, attempt_id: str) -> AttemptContext | Attempt | None:
        """An attempt by its id alone, also one that has ended. None for an unknown id."""
        return self._contexts.get(attempt_id) or await self.store.get_attempt(attempt_id)

    @contextmanager
    def track(self, context: AttemptContext | None) -> Generator[None]:
        """Within it, the end of the attempt cancels the current task and raises ApiError."""
        if context is None:
            yield
            return
        call = asyncio.current_task()
        assert call is not None
        context.calls.add(call)
        if context.ended is not None:
            call.cancel(context.ended)
        try:
            yield
        except asyncio.CancelledError:
            if context.ended is None:
                raise
            call.uncancel()
            raise context.ended from None
        finally:
            context.calls.discard(call)

    def recheck_superseded(self, stored: Iterable[Span]) -> None:
        """Ask for an attempt again at its next call if the store has marked its spans as superseded."""
        for span in stored:
            if SUPERSEDED in span.attributes and (context := self._contexts.get(span.attempt_id)):
                context.checked_at = -math.inf

    async def close(self) -> None:
        """Stop the watch. A later call starts it again."""
        if self._watcher is not None and not self._watcher.done():
            self._watcher.cancel()
            await asyncio.wait({self._watcher})

    # -- what the store says -----------------------------------------------------------------------------------------

    async def _load(self, rollout_id: str, attempt_id: str) -> AttemptContext:
        context = self._contexts.get(attempt_id)
        if context is None or context.rollout_id != rollout_id:
            context = await self._read(rollout_id, attempt_id)
        await self._check([context])
        if context.ended is not None:
            raise context.ended
        self._contexts[attempt_id], context.called_at = context, context.checked_at
        self._contexts.move_to_end(attempt_id)
        if len(self._contexts) > self._limit:
            self._contexts.pop(next((name for name, each in self._contexts.items() if not each.calls), ""), None)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        return context

    async def _read(self, rollout_id: str, attempt_id: str) -> AttemptContext:
        rollout = await self.store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise _unknown_rollout(rollout_id)
        if rollout.resources_id is None:
            update = await self.store.get_latest_resources()
        else:
            update = await self.store.get_resources_by_id(rollout.resources_id)
            if update is None:
                message = (
                    f"rollout {rollout.rollout_id!r} uses resources {rollout.resources_id!r}, which are not stored"
                )
                raise ApiError(500, message, code="resources_not_found", retry=False)
        resources = update.resources if update else {}
        return AttemptContext(
            rollout_id,
            attempt_id,
            {llm.model: (name, llm) for name, llm in resources.items() if isinstance(llm, LLM)},
            rollout.resources_id is not None,
            attempt_trace_id(attempt_id),
            rollout.mode,
            await load_replay(self.store, rollout.metadata.get(BRANCH)),
        )

    async def _watch(self) -> None:
        """While the store does not answer, the log says so."""
        is_blind = False
        while self._contexts:
            await asyncio.sleep(self._check_seconds)
            since = time.monotonic() - self._idle_seconds
            contexts = [each for each in self._contexts.values() if each.calls or each.called_at > since]
            try:
                for start in range(0, len(contexts), _ATTEMPTS_PER_QUERY):
                    await self._check(contexts[start : start + _ATTEMPTS_PER_QUERY])
            except Exception as error:
                if not is_blind:
                    unexpected = None if isinstance(error, StoreError) else error
                    message = "the store does not say which attempts have ended, so calls ask it themselves: %s"
                    logger.warning(message, error, exc_info=unexpected)
                is_blind = True
            else:
                if is_blind:
                    logger.warning("the store says again which attempts have ended")
                is_blind = False

    async def _check(self, contexts: Sequence[AttemptContext]) -> None:
        """Confirm the attempts that run, and end the others. One query, and another one where the latest attempt of a
        rollout is not clear."""
        now = time.monotonic()
        found = await self.store.get_latest_attempts([each.rollout_id for each in contexts])
        latest = {each.rollout_id: each for each in found}
        clear = {each.attempt_id for each in found if each.status != "unresponsive"}
        unclear = [each.rollout_id for each in contexts if each.attempt_id not in clear]
        rollouts = await self.store.query_rollouts(rollout_id_in=unclear) if unclear else []
        rollout_of = {each.rollout_id: each for each in rollouts}
        for context in contexts:
            attempt = latest.get(context.rollout_id)
            reason = await self._end_reason(context, attempt, rollout_of.get(context.rollout_id))
            if reason is None:
                context.checked_at, context.worker_id = now, attempt and attempt.worker_id
            elif context.ended is None:
                self._end(context, reason)

    async def _end_reason(
        self, context: AttemptContext, latest: Attempt | None, rollout: Rollout | None
    ) -> ApiError | None:
        """Why an attempt takes no more calls; None while it does. `latest` is the latest attempt of its rollout."""
        rollout_id, attempt_id = context.rollout_id, context.attempt_id
        if latest is not None and latest.attempt_id == attempt_id:
            if latest.status in ("succeeded", "failed", "timeout"):
                message = f"the attempt {attempt_id!r} of rollout {rollout_id!r} ended as {latest.status}"
            elif rollout is not None and rollout.finished:
                outcome = "was cancelled" if rollout.status == "cancelled" else "has ended"
                message = f"the rollout {rollout_id!r} {outcome}"
            else:
                return None
            return conflict("attempt_ended", f"{message}; it takes no more calls")
        if rollout is None:
            return _unknown_rollout(rollout_id)
        known = await self.find(attempt_id)
        if known is None or known.rollout_id != rollout_id:
            return ApiError(404, f"rollout {rollout_id!r} has no attempt {attempt_id!r}", code="attempt_not_found")
        message = f"a later attempt of rollout {rollout_id!r} has taken the place of {attempt_id!r}; stop calling"
        return conflict("attempt_superseded", message)

    def _end(self, context: AttemptContext, reason: ApiError) -> None:
        context.ended = reason
        if self._contexts.get(context.attempt_id) is context:
            del self._contexts[context.attempt_id]
        self._forget(context.rollout_id, context.attempt_id)
        for call in context.calls:
            call.cancel(reason)


def _unknown_rollout(rollout_id: str) -> ApiError:
    return ApiError(404, f"the store knows no rollout {rollout_id!r}", code="rollout_not_found")
