"""Scores what an agent printed: 1.0 if its last number is the answer, else 0.0."""

import re


def score(output: str, answer: int) -> float:
    numbers = re.findall(r"-?\d+", output)
    return float(bool(numbers) and int(numbers[-1]) == answer)
