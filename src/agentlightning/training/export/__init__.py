"""Exports of a run: its weights for other programs, its rollouts as data sets for other trainers."""
