"""Neither stored turns nor the text of a conversation change what a provider receives later."""

import copy

from agentlightning.gateway.config import Provider
from agentlightning.gateway.dialects.chat import CHAT
from agentlightning.gateway.forwarding.bodies import messages_body

ANTHROPIC = Provider(name="them", dialect="anthropic", base_urls=("http://127.0.0.1:9",))
BLOCKS = [{"type": "thinking", "thinking": "Hm.", "signature": "s1"}, {"type": "text", "text": "one"}]


def test_a_stored_turn_never_changes_whatever_follows_it():
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "more"},
    ]
    stored = copy.deepcopy(BLOCKS)
    found = iter([stored, []])
    request = CHAT.read({"model": "m", "messages": conversation}, None)
    body = messages_body(request, ANTHROPIC, "m", lambda key: next(found))
    assert body["messages"][1]["content"] == [*BLOCKS, {"type": "text", "text": "two"}]
    assert stored == BLOCKS
