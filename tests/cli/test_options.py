"""Durations and sizes are read as people write them, and refused by name otherwise."""

from __future__ import annotations

import pytest

from agentlightning.cli.options import read_duration, read_size, retention_from
from agentlightning.errors import ConfigError
from agentlightning.store.types import Retention


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("15min", 900), ("12h", 43200), ("30d", 2592000), ("1.5 H", 5400), ("2w", 1209600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("10", 10), ("10b", 10), ("1.5KB", 1500), ("1 MiB", 2**20), ("10GB", 10**10), (" .5tb ", 5 * 10**11)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "30", "d", "-3d", "3 months", "3d4h", "1e9s", "nan", "٣d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration such as 90s"):
        read_duration(text)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "10XB", "ten", "1,5GB", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size such as 500MB"):
        read_size(text)


def test_a_size_beyond_every_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match="is too large for a size"):
        read_size("99999999TB")


def test_retention_is_what_was_said() -> None:
    assert retention_from("1d", 5, "1KB") == Retention(max_age_seconds=86400, max_rollouts=5, max_bytes=1000)
    assert retention_from(None, 0, None) == Retention(max_rollouts=0)


def test_retention_of_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="say what to remove"):
        retention_from(None, None, None)
    with pytest.raises(ConfigError, match="--keep -1"):
        retention_from(None, -1, None)
