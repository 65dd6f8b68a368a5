"""Agents of real frameworks are recorded to the token, by nothing but the environment variables of their attempt.

They are those of `examples/frameworks`. The frameworks are installed by `setup.sh`, apart from ours and from one
another; what is not installed is skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.frameworks.examples import ALL, Example
from tests.frameworks.service import starting_models

from agentlightning import span as names
from agentlightning.assemble import calls as answered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("example", ALL, ids=lambda example: example.name)
async def test_an_agent_finishes_and_every_token_of_it_is_recorded(
    serve: Any, tmp_path: Path, example: Example
) -> None:
    """Every call that was answered is there with its tokens, and each goes on in those of the one before where it can.
    Anthropic's tool runner is refused a thread first, and then sends everything."""
    if missing := example.missing():
        pytest.skip(missing)
    start = starting_models()
    service = await serve(start.teacher(guesses=False))
    given = json.dumps({"question": start.question(start.A, start.B)})
    ended = await service.run(example.command(), tmp_path, example.variables(), given)
    assert ended.code == 0, ended.stderr
    assert f"It is {start.A * start.B}." in ended.stdout, ended.stderr
    kept = [span.attributes for span in answered(await service.calls())]
    assert len(kept) >= 2
    for call, (prompt, _) in zip(kept, service.engine.calls, strict=True):
        assert call[names.PROMPT_TOKEN_IDS] == prompt
        assert len(call[names.RESPONSE_TOKEN_IDS]) == len(call[names.LOGPROBS]) > 0
    first, second = kept[0], kept[1]
    known = first[names.PROMPT_TOKEN_IDS] + first[names.RESPONSE_TOKEN_IDS]
    assert (second[names.PROMPT_TOKEN_IDS][: len(known)] == known) == example.continues
