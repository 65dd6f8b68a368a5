"""Scores what a team printed, which needs no model that can write."""


def score(output: str) -> float:
    """The share of vowels."""
    return sum(letter in "aeiou" for letter in output.lower()) / max(1, len(output))


def right_specialist(output: str, specialist: str) -> float:
    """1 if the agent that answered, which the output begins with, is the one for the question."""
    return float(output.startswith(f"{specialist}:"))
