"""Text for people: sizes and durations, a rollout, the report of a training run."""
