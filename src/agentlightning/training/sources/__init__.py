"""Rollout sources: batches of trajectories from rollouts run for the steps (stream) or recorded earlier."""
