"""Promises of what is known of a provider: which of its answer's headers its caller sees."""

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.provider import passed_headers

SEEN = [
    (b"x-request-id", b"req_1"),
    (b"request-id", b"req_2"),
    (b"retry-after", b"3"),
    (b"retry-after-ms", b"250"),
    (b"openai-processing-ms", b"42"),
    (b"x-ratelimit-remaining-requests", b"59"),
    (b"x-ratelimit-reset-tokens", b"6m0s"),
    (b"anthropic-ratelimit-tokens-remaining", b"9000"),
]
KEPT_BACK = [
    (b"content-length", b"12"),
    (b"connection", b"close"),
    (b"transfer-encoding", b"chunked"),
    (b"content-type", b"application/json"),
    (b"set-cookie", b"session=1"),
    (b"openai-organization", b"acme"),
    (b"anthropic-organization-id", b"acme"),
    (b"x-should-retry", b"true"),
    (b"server", b"them"),
]


def test_callers_see_request_ids_rate_limits_and_when_to_come_back_and_nothing_else():
    mixed = [header for pair in zip(SEEN, KEPT_BACK, strict=False) for header in pair] + KEPT_BACK[len(SEEN) :]
    assert passed_headers(mixed) == SEEN


def test_a_header_that_comes_twice_is_passed_twice():
    twice = [(b"x-ratelimit-limit-requests", b"60"), (b"x-ratelimit-limit-requests", b"100")]
    assert passed_headers(twice) == twice


@given(st.lists(st.tuples(st.sampled_from([name for name, _ in SEEN]), st.binary(max_size=40))))
def test_what_is_passed_is_always_one_short_line(headers):
    for _, value in passed_headers(headers):
        assert not set(value) & set(b"\r\n\0")
    assert passed_headers([(b"request-id", b"x" * 70000)]) == []
