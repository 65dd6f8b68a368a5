"""Rollout sources: batches of trajectories from rollouts run now (live), run ahead (streaming) or recorded earlier."""
