"""The settings of published weights."""

from __future__ import annotations

from pydantic import Field

from agentlightning.util.settings import Section


class WeightsConfig(Section):
    """Where each version of the weights of a run is published, for hosts that pull it (`agl weights pull`).

    >>> agl.WeightsConfig(url="s3://bucket/run-7").full_every
    20
    """

    url: str | None = None
    """A URL of fsspec: file:///DIR, s3://BUCKET/DIR, gs://BUCKET/DIR ... None: weights are not published."""
    full_every: int = Field(default=20, ge=1)
    """After so many versions comes a full one; those between hold only what changed since the one before."""
    keep_full: int = Field(default=2, ge=1)
    """The newest full versions that are kept, with all that follow the older of them."""
