"""Gives a rollout that branches off another one the recorded answers of the calls before the branch, token for token,
and, where it branches inside an answer, the beginning of that one.

A request is answered from the record if its prompt is that of a recorded call. The first one that is not ends the
replay: from there on, everything is sampled. So an agent that does something else this time is served as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning import span as names
from agentlightning.engine.base import FinishReason, Sample, SamplingParams
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.util.json_values import loads
from agentlightning.util.kept_sets import KeptSets


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


async def load_replay(store: LightningStoreBase, branch: Mapping[str, Any]) -> Replay:
    """What is recorded of the calls that a rollout's metadata names; those that are gone are sampled."""
    spans = {span.span_id: span for span in await store.query_spans(branch["rollout_id"])}
    wanted = [(span_id, None) for span_id in branch["span_ids"]] + [*branch.get("kept", {}).items()]
    return Replay([RecordedAnswer.of(spans[span_id], beginning) for span_id, beginning in wanted if span_id in spans])


def _call_ids(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    messages: Any = loads(attributes[names.OUTPUT_MESSAGES])
    return tuple(part["id"] for message in messages for part in message["parts"] if part["type"] == "tool_call")
