"""Durations and sizes are read as people write them, and refused by name otherwise."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build
from agentlightning.cli.options import read_duration, read_size, retention_from
from agentlightning.cli.serve import Options
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


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5iB", "10XB", "ten", "1,5GB", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size such as 500MB"):
        read_size(text)


def test_a_size_beyond_every_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match="is too large for a size"):
        read_size("99999999TB")


def test_retention_is_what_was_said() -> None:
    assert retention_from(86400, 5, "1KB") == Retention(max_age_seconds=86400, max_rollouts=5, max_bytes=1000)
    assert retention_from(None, 0, None) == Retention(max_rollouts=0)
    assert Options(keep_days=1e-7, keep_rollouts=None, keep_size=None).retention == Retention(max_age_seconds=0.00864)
    assert Options(keep_days=None, keep_rollouts=None, keep_size=None).retention is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("store prune", "say what to remove"),
        ("store prune --keep -1", "Invalid value for '--keep'"),
        ("serve --keep-days inf", "Invalid value for '--keep-days'"),
        ("serve --keep-days 1e19", "Invalid value for '--keep-days'"),
    ],
)
def test_a_retention_that_cannot_be_is_refused_by_the_name_of_its_option(line: str, message: str) -> None:
    done = CliRunner().invoke(build(), line.split())
    assert (done.exit_code, message in done.output) == (2, True), done.output
