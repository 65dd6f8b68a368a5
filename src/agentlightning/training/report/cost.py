"""What a run has cost: tokens where calls were recorded, money where prices are set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from agentlightning import span as names
from agentlightning.gateway.upstream.budget import spend_of_spans
from agentlightning.store.base import LightningStoreBase

CHUNK: Final = 256
"""Rollouts whose spans are read at once."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run, or a stage of it, has used.

    >>> agl.Cost(search_tokens=1200).search_money is None
    True
    """

    sampled_tokens: int = 0
    """Tokens that the policy sampled in the rollouts that were trained on."""
    search_calls: int = 0
    """Calls of critic and editor."""
    search_tokens: int = 0
    """Tokens, read and written, of critic, editor, and the agent's recorded calls in prompt searches."""
    search_money: float | None = None
    """What these cost by the prices of `PromptModel` and `SearchBudget`. None: none is set."""
    provider_calls: int = 0
    """Calls of agents that the gateway has sent to providers, in the last attempt of each rollout, evaluations
    included. Those of a prompt search are among its tokens and its money."""
    provider_tokens: int = 0
    provider_dollars: float | None = None
    """What those calls cost that have a price (`gateway.providers`, `gateway.routes`), in US dollars. None: no call has
    one."""
    provider_calls_without_price: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cost_of_steps(lines: Sequence[Mapping[str, Any]]) -> Cost:
    """The cost of steps by their metrics. What a prompt search counts is its total so far, so its last step has it."""
    sampled = sum(int(line.get("sampled_tokens") or 0) for line in lines)
    searches: dict[int, Mapping[str, Any]] = {line.get("stage", 0): line for line in lines if "apo_tokens" in line}
    ends = searches.values()
    money = sum(float(line["apo_money"]) for line in ends)
    return Cost(
        sampled,
        sum(int(line["apo_model_calls"]) for line in ends),
        sum(int(line["apo_tokens"]) for line in ends),
        money or None,
    )


async def with_providers(cost: Cost, store: LightningStoreBase, run_id: str) -> Cost:
    """The cost with the calls to providers that the spans of a run record, without those of its searches, which are
    counted."""
    found = [each.rollout_id for each in await store.query_rollouts(rollout_id_contains=run_id)]
    ids = [each for each in found if not each.startswith(f"{run_id}-trial-")]
    calls = priced = tokens = 0
    dollars = 0.0
    for start in range(0, len(ids), CHUNK):
        async for _, spans in store.iter_spans(ids[start : start + CHUNK]):
            sent = [span for span in spans if names.PROVIDER_RETRIES in span.attributes]
            spent = spend_of_spans(sent)
            calls, tokens, dollars = calls + len(sent), tokens + spent.tokens, dollars + spent.dollars
            priced += sum(names.COST in span.attributes for span in sent)
    return replace(
        cost,
        provider_calls=calls,
        provider_tokens=tokens,
        provider_dollars=dollars if priced else None,
        provider_calls_without_price=calls - priced,
    )
