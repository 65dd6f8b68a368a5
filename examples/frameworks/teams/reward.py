"""Scores what a team printed, which needs no model that can write."""


def score(output: str) -> float:
    """The share of vowels."""
    return sum(letter in "aeiou" for letter in output.lower()) / max(1, len(output))


def handed_over(output: str) -> float:
    """1 if the editor had the last word, which begins its texts with "Edited:"."""
    return float(output.startswith("Edited:"))
