"""What people say of a recorded rollout: a score, a label, a comment, and the signed links by which they say it.

Feedback is a span of the rollout's latest attempt. One with a score is the final reward of the rollout from then on,
whatever was recorded before, as after `agl rescore`: people come last. The newest counts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import time
from dataclasses import dataclass, replace
from typing import Any, Final

from agentlightning import span as names
from agentlightning.attempt_address import attempt_secret, read_signed, sign
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, RewardError
from agentlightning.span import Span, usable_reward
from agentlightning.store.base import STORE_VARIABLE, LightningStore
from agentlightning.store.ids import new_hex
from agentlightning.tracing.agent_spans import event_span

LINK_PATH: Final = "/feedback"
WEEK_SECONDS: Final = 7 * 86400.0
MAX_TEXT: Final = 10_000
"""Characters of a label or a comment."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What somebody says of a rollout. Raises RewardError for a score, and ConfigError for a text, that cannot be
    stored, and for saying nothing."""

    score: float | None = None
    label: str | None = None
    comment: str | None = None

    def __post_init__(self) -> None:
        if self.score is not None and (isinstance(self.score, bool) or usable_reward(self.score) is None):
            limit = names.MAX_REWARD
            raise RewardError(
                f"score={self.score!r:.80} is not a number from {-limit:g} to {limit:g}; send one, or none"
            )
        for name, text in (("label", self.label), ("comment", self.comment)):
            if text is not None and not isinstance(text, str):
                raise ConfigError(f"{name}={text!r:.80} is not text")
            if text is not None and len(text) > MAX_TEXT:
                raise ConfigError(f"{name} has {len(text)} characters; {MAX_TEXT} are stored at most")
        if self.score is None and not self.label and not self.comment:
            raise ConfigError("the feedback says nothing; give a score, a label or a comment")

    def attributes(self, source: str) -> dict[str, Any]:
        """As attributes of a span."""
        found: dict[str, Any] = {names.FEEDBACK_SOURCE: source, names.JUDGE: True}
        if self.score is not None:
            found |= {names.EVALUATION_NAME: "human_feedback", names.SCORE_VALUE: float(self.score)}
            found[names.RESCORED] = "human_feedback"
        if self.label:
            found[names.FEEDBACK_LABEL] = self.label
        if self.comment:
            found[names.FEEDBACK_COMMENT] = self.comment
        return found


MOST_CHANGES: Final = 10
"""Feedbacks that one source may give on one attempt: a person may change their mind, and a link may be passed on."""


async def add_feedback(store: LightningStore, rollout_id: str, feedback: Feedback, source: str | None = None) -> Span:
    """Store feedback; returns its span. Repeated by the same `source` it changes nothing; something else from that
    source comes in addition, and counts from then on. Raises NotFoundError for a rollout that never began,
    and ConflictError for the eleventh change of mind."""
    attempt = await store.get_latest_attempt(rollout_id)
    if attempt is None:
        raise NotFoundError(f"there is no rollout {rollout_id!r} that has begun; feedback is for recorded ones")
    content = json.dumps([feedback.score, feedback.label, feedback.comment])
    source = hashlib.sha256(content.encode()).hexdigest()[:16] if source is None else source
    attributes = feedback.attributes(source)
    spans = await store.query_spans(rollout_id, attempt.attempt_id)
    before = [span for span in spans if span.attributes.get(names.FEEDBACK_SOURCE) == source]
    if before and {**before[-1].attributes} == attributes:
        return before[-1]
    if len(before) >= MOST_CHANGES:
        raise ConflictError(
            f"{source!r:.80} has given {len(before)} different feedbacks on {rollout_id!r}, and no further one is taken"
        )
    key = f"{attempt.attempt_id} feedback {len(before)} {source}"
    name = names.FEEDBACK if feedback.score is None else names.REWARD
    span = replace(
        event_span(rollout_id, attempt.attempt_id, name, attributes),
        span_id=hashlib.sha256(key.encode()).hexdigest()[:16],
    )
    return await store.add_span(span)


# -- links -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeedbackLink:
    """What a valid link says."""

    rollout_id: str
    expiry: float
    nonce: str


def feedback_link(
    rollout_id: str, *, server: str | None = None, token: str | None = None, expires_in: float = WEEK_SECONDS
) -> str:
    """A link by which a person can give feedback on one rollout, without a token: a page with thumbs up and down.

    server: the URL of `agl serve`; by default AGL_STORE, where that is one. token: the access token of the server,
    which signs the link; AGL_TOKEN by default. A server without a token cannot tell forged links. expires_in: seconds
    until the link is refused. Raises ConfigError for values that make no link.

        >>> agl.feedback_link("ro-1", server="http://127.0.0.1:4747", token="secret")[:31]
        'http://127.0.0.1:4747/feedback/'
    """
    server = os.environ.get(STORE_VARIABLE, "") if server is None else server
    if not isinstance(server, str) or not server.startswith(("http://", "https://")):
        raise ConfigError(
            f"server={server!r:.200} is no URL of a server; give server='http://host:4747' of `agl serve`"
        )
    if not isinstance(rollout_id, str) or not rollout_id:
        raise ConfigError(f"rollout_id={rollout_id!r:.80} is no id; take `session.rollout_id`")
    if isinstance(expires_in, bool) or not isinstance(expires_in, int | float) or not 0 < expires_in < math.inf:
        raise ConfigError(f"expires_in={expires_in!r:.80} is no time; give the seconds that the link is valid")
    token = os.environ.get("AGL_TOKEN") or None if token is None else token
    link = FeedbackLink(rollout_id, round(time.time() + expires_in), new_hex())
    return f"{server.rstrip('/')}{LINK_PATH}/{sign_link(attempt_secret(token), link)}"


def sign_link(secret: str, link: FeedbackLink) -> str:
    """The last part of the path of a link."""
    fields = json.dumps([LINK_PATH, link.rollout_id, link.expiry, link.nonce]).encode()
    return sign(secret, base64.urlsafe_b64encode(fields).decode().rstrip("="))


def read_link(secret: str, text: str) -> FeedbackLink | None:
    """What a link says that `sign_link` made with the same secret, expired or not; None for any other."""
    body = read_signed(secret, text) or ""
    try:
        path, *fields = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (ValueError, TypeError):
        return None
    return FeedbackLink(*fields) if path == LINK_PATH else None
