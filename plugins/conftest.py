"""What holds for all tests holds for those of plugins."""

from tests.conftest import _leaves_no_process_behind, _leaves_the_checkout_alone, hub

__all__ = ["_leaves_no_process_behind", "_leaves_the_checkout_alone", "hub"]
