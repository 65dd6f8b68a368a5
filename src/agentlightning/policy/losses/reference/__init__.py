"""Losses against the log-probabilities of a reference, a teacher, or the policy given feedback."""
