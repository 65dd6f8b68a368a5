"""Algorithms: what a training run does at each step, found by the `type` in their settings."""
