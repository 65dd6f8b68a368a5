"""A store, and rollouts in it, for tests of rollout sources."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentlightning.rollouts import AttemptedRollout
from agentlightning.span import (
    LOGPROBS,
    OPERATION_NAME,
    POLICY_VERSION,
    PROMPT_TOKEN_IDS,
    RESPONSE_TOKEN_IDS,
    REWARD,
    SCORE_VALUE,
    Span,
    new_span_id,
)
from agentlightning.store import InMemoryLightningStore

Finish = Callable[..., Awaitable[None]]


@pytest.fixture
def finish(store: InMemoryLightningStore) -> Finish:
    """Finishes a claimed rollout with a reward, after one call of the policy at a version of its weights."""

    async def finish(rollout: AttemptedRollout, reward: float = 1.0, version: int | None = None) -> None:
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        call: dict[str, Any] = {OPERATION_NAME: "chat", PROMPT_TOKEN_IDS: [1], RESPONSE_TOKEN_IDS: [2]}
        call |= {LOGPROBS: [-0.5]} | ({} if version is None else {POLICY_VERSION: version})
        await store.add_span(Span(*ids, "chat", 0.0, span_id=new_span_id(), attributes=call))
        await store.add_span(Span(*ids, REWARD, 0.0, span_id=new_span_id(), attributes={SCORE_VALUE: reward}))
        await store.update_attempt(*ids, status="succeeded")

    return finish
