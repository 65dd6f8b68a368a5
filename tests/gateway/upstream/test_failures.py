"""What a provider's refusal says, however it is written."""

import math

import pytest

from agentlightning.gateway.upstream.failures import retry_after


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        (b"retry-after", b"3", 3.0),
        (b"retry-after-ms", b"250", 0.25),
        (b"retry-after", b"-5", None),
        (b"retry-after", b"soon", None),
        (b"retry-after-ms", b"nan", None),
        (b"retry-after-ms", b"inf", 86_400.0),
        (b"retry-after", b"9" * 400, 86_400.0),
        (b"retry-after", b"Fri, 31 Dec 9999 23:59:59 GMT", 86_400.0),
        (b"retry-after", b"Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
    ],
)
def test_how_long_to_wait_is_a_number_that_can_be_waited_for_or_nothing(name, value, seconds):
    found = retry_after([(b"content-type", b"text/plain"), (name, value)])
    assert found == seconds
    assert found is None or math.ceil(found) >= 0
