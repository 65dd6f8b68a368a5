"""Mapping of rows to rollouts."""

from __future__ import annotations

from agentlightning.rollouts import RolloutConfig
from agentlightning.store.sql import mapping


def test_the_default_configuration_takes_no_space() -> None:
    assert mapping.config_text(RolloutConfig()) is None
    config = RolloutConfig(max_attempts=2, timeout_seconds=1.5)
    assert mapping.load_config(mapping.config_text(config)) == config
