"""Publishes the weights of a run after each update, where other hosts pull them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from agentlightning.policy.base import Policy
from agentlightning.weight_sync.disk import CheckpointFolder
from agentlightning.weight_sync.versions.config import WeightsConfig
from agentlightning.weight_sync.versions.publish import WeightPublisher


class WeightVersions:
    """The published versions of one policy. `folder` gets the two newest, of which differences are made."""

    def __init__(self, policy: Policy, config: WeightsConfig, folder: Path) -> None:
        """Raises MissingExtraError, and ConfigError for a URL that cannot be opened."""
        assert config.url is not None
        self._policy, self._folder = policy, CheckpointFolder(folder)
        self._publisher = WeightPublisher(config.url, full_every=config.full_every, keep_full=config.keep_full)

    async def publish(self) -> Mapping[str, float]:
        """Publish the weights as they are now: bytes written, of all files, whether the version is full, and seconds.
        Raises WeightStoreError."""
        directory = await self._folder.write(self._policy)
        found = await asyncio.to_thread(self._publisher.publish, directory, self._policy.policy_version)
        await self._folder.prune(directory)
        return {
            "weights_bytes": float(found.bytes),
            "weights_size": float(found.size),
            "weights_full": float(found.full),
            "weights_seconds": found.seconds,
        }


def weight_versions(policy: Policy, config: WeightsConfig, folder: Path) -> WeightVersions | None:
    """None where the settings name no URL. Raises as `WeightVersions`."""
    return None if config.url is None else WeightVersions(policy, config, folder)
