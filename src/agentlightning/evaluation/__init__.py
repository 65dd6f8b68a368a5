"""How good an agent is on tasks: a reward for each task, means with confidence intervals, and paired gains. Pure."""
