"""The agent that `real_model.py` trains, for `agl train`: two-digit sums, reward 1 if the last number is right."""

from __future__ import annotations

import re

from openai import OpenAI

QUESTION = "What is {a} + {b}? Reply with only the number."
MAX_TOKENS = 16
CLIENT = OpenAI(api_key="unused", base_url="http://127.0.0.1:9")


def solve(a: int, b: int, base_url: str) -> float:
    answer = CLIENT.with_options(base_url=base_url).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": QUESTION.format(a=a, b=b)}], max_tokens=MAX_TOKENS
    )
    numbers = re.findall(r"\d+", answer.choices[0].message.content or "")
    return float(bool(numbers) and int(numbers[-1]) == a + b)
