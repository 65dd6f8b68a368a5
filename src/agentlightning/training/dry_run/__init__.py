"""Checks everything short of training: imports, tasks, the model, a few rollouts, their calls, tokens and rewards."""
