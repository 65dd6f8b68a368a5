"""Turns exchanges into spans: those of local answers, of provider answers and of rejected calls."""
