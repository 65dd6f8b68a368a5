"""Which tasks a run learns from next, and which groups of rollouts are worth an update."""
