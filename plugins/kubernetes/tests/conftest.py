"""Runners with a real store, as the runner's own tests have them."""

from tests.runner.conftest import attempt_of, rewards_of, roll, start

__all__ = ["attempt_of", "rewards_of", "roll", "start"]
