"""Scores what a team printed: the share of vowels in it, which needs no model that can write."""


def score(output: str) -> float:
    return sum(letter in "aeiou" for letter in output.lower()) / max(1, len(output))
