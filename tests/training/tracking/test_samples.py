"""Transcripts are written for people."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.assemble import said

CALL = {"type": "tool_call", "id": "call_1", "name": "calculator", "arguments": {"expression": "6*8", "digits": 2}}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "text", "content": "It is 48."}, "It is 48."),
        (CALL, 'calculator(expression="6*8", digits=2)'),
        ({**CALL, "arguments": '{"expression": '}, 'calculator({"expression": )'),
        ({**CALL, "arguments": {}}, "calculator()"),
        ({**CALL, "arguments": None}, "calculator()"),
        ({"type": "tool_call_response", "id": "call_1", "response": "48"}, "48"),
        ({"type": "tool_call_response", "id": "call_1", "response": {"value": 48}}, '{"value":48}'),
        ({"type": "blob", "mime_type": "image/png"}, '{"mime_type":"image/png"}'),
    ],
)
def test_each_part_of_a_message_is_readable(part: dict[str, Any], text: str) -> None:
    assert said({"role": "assistant", "parts": [part]}) == text


def test_the_parts_of_a_message_are_all_shown() -> None:
    message = {"role": "assistant", "parts": [{"type": "text", "content": "Let me see."}, CALL]}
    assert said(message, "\n") == 'Let me see.\ncalculator(expression="6*8", digits=2)'
