"""Scores what the agent printed: 1.0 for the right number in the right form, else 0.0."""

import re


def score(output: str, answer: float) -> float:
    found = re.findall(r"### ANSWER: (-?\d+(?:\.\d+)?) ###", output)
    return float(len(found) == 1 and abs(float(found[0]) - float(answer)) < 1e-6)
