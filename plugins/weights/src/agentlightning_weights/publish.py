"""Publishes versions of weights: a full one now and then, and between these only what changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex

from agentlightning.policy.base import Policy
from agentlightning.policy.config import WeightsConfig
from agentlightning.weight_sync.disk import CheckpointFolder
from agentlightning_weights.bucket import MANIFEST, WANTED, Bucket, FileEntry, Manifest, folder_of, stored_form

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Writes versions to a URL. Not thread safe; blocks."""

    def __init__(self, url: str, *, full_every: int = 20, keep_full: int = 2) -> None:
        """Every `full_every`-th version is full, and so is the first one, one that a host asked for, and one whose
        tensors have other shapes. Versions before the `keep_full` newest full ones are removed. Raises as `Bucket`."""
        self.bucket = Bucket(url)
        self._full_every, self._keep_full = full_every, keep_full
        self._base: tuple[int, str, Path] | None = None
        self._since_full = 0

    def publish(self, directory: Path, version: int) -> dict[str, float]:
        """Write the weights in `directory`, which must stay as it is until the next version is published: bytes
        written, of all files, whether the version is full, and seconds. Raises WeightStoreError; hosts then see the
        version before, and the next one is full."""
        since, wanted = time.monotonic(), self.bucket.names(WANTED)
        full = self._since_full >= self._full_every or bool(wanted)
        base, self._base = None if full else self._base, None
        folder, entries = folder_of(version), list[FileEntry]()
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            name = file.relative_to(directory).as_posix()
            entry, data = stored_form(file, name, base and base[2] / name)
            if data:
                self.bucket.write(f"{folder}/{entry.object_name}", data)
            entries.append(entry)
        manifest = Manifest(
            version=version,
            id=token_hex(8),
            base=base[:2] if base is not None and any(entry.kind != "whole" for entry in entries) else None,
            files=tuple(entries),
            stored=sum(entry.stored for entry in entries),
        )
        self.bucket.write(f"{folder}/{MANIFEST}", manifest.model_dump_json().encode())
        for host in wanted:
            logger.warning("version %d is full, because %s asked for it", version, host.removesuffix(".json"))
            self.bucket.remove(f"{WANTED}/{host}")
        self._base = (version, manifest.id, directory)
        self._since_full = 1 if manifest.base is None else self._since_full + 1
        self._prune()
        return {
            "weights_bytes": float(manifest.stored),
            "weights_size": float(sum(entry.size for entry in entries)),
            "weights_full": float(manifest.base is None),
            "weights_seconds": time.monotonic() - since,
        }

    def _prune(self) -> None:
        versions = self.bucket.versions()
        full = [version for version in versions if self.bucket.manifest(version).base is None]
        if len(full) <= self._keep_full:
            return
        for version in versions:
            if version < full[-self._keep_full]:
                self.bucket.remove(f"{folder_of(version)}/{MANIFEST}")  # First, so that nobody begins to read it.
                self.bucket.remove(folder_of(version))


class WeightVersions:
    """The published versions of one policy. `folder` gets the two newest, of which differences are made."""

    def __init__(self, policy: Policy, config: WeightsConfig, folder: Path) -> None:
        """Raises ConfigError for a URL that cannot be opened."""
        assert config.url is not None
        self._policy, self._folder = policy, CheckpointFolder(folder)
        self._publisher = WeightPublisher(config.url, full_every=config.full_every, keep_full=config.keep_full)

    async def publish(self) -> Mapping[str, float]:
        """Publish the weights as they are now; returns and raises as `WeightPublisher.publish`."""
        directory = await self._folder.write(self._policy)
        metrics = await asyncio.to_thread(self._publisher.publish, directory, self._policy.policy_version)
        await self._folder.prune(directory)
        return metrics
