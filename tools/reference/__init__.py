"""Writes the pages of the reference from the code: `python -m tools.reference` (`make reference`)."""
