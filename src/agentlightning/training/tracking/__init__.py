"""Sends what a run measures to experiment trackers. A tracker that fails is a warning and a count, never a stop."""
