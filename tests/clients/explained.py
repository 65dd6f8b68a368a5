"""Tests of clients' suites that fail by design, and why. The documentation shows it."""

from __future__ import annotations

EXPLAINED: dict[str, dict[str, str]] = {
    "openai": {
        "test_responses_list_their_input": (
            "stored responses are served, and continue by `previous_response_id`; their `input_items` are not listed"
        ),
        "test_responses_in_the_background": "background responses are refused by name: a rollout waits for its answers",
    },
    "anthropic": {"test_batches": "batches are not served: an agent waits for each answer"},
    "langchain_openai": {},
    "langchain_anthropic": {},
    "litellm": {},
    "instructor": {},
    "dspy": {},
}
