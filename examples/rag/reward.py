"""The reward of an answer: how many of its words are right, and whether it has the form that was asked for."""

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

WEIGHTS = {"correctness": 0.9, "format": 0.1}
"""The reward is 0.9 correctness + 0.1 format."""
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(task: Mapping[str, Any], output: str) -> dict[str, float]:
    """correctness: the best word F1 of the last tagged answer with the task's answer and its aliases; 0 without tags.
    format: 1 if the output ends with an answer in tags, is not empty between them, and has no other, else 0."""
    found = [text.strip() for text in TAGGED.findall(output)]
    accepted = [task["answer"], *task.get("aliases", ())]
    return {
        "correctness": max(f1(found[-1], text) for text in accepted) if found else 0.0,
        "format": float(len(found) == 1 and bool(found[0]) and output.rstrip().endswith("</answer>")),
    }


def f1(given: str, wanted: str) -> float:
    """The harmonic mean of precision and recall of the words, as in SQuAD (arXiv 1606.05250, section 6.1)."""
    left, right = Counter(words(given)), Counter(words(wanted))
    common = (left & right).total()
    if not common:
        return float(left == right)
    return 2 * common / (left.total() + right.total())


def words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in ("a", "an", "the")]
