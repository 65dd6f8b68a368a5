"""Instructor: typed answers by tools, JSON and schemas, streamed and not, repeated where they are not valid."""

from collections.abc import Iterable

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Tell me about 'Ada', who is 36."}]


class User(BaseModel):
    age: int
    name: str


OPENAI = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT]
RESPONSES = [instructor.Mode.RESPONSES_TOOLS]
ANTHROPIC = [instructor.Mode.ANTHROPIC_TOOLS]


def options(mode):
    return {"model": "policy", "max_retries": 1, **({"max_tokens": 200} if mode in ANTHROPIC else {})}


@pytest.fixture(params=[*OPENAI, *RESPONSES, *ANTHROPIC], ids=lambda mode: mode.name.lower())
def mode(request):
    return request.param


@pytest.fixture
def client(mode):
    if mode in ANTHROPIC:
        return instructor.from_anthropic(anthropic.Anthropic(max_retries=0), mode=mode)
    return instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)


def test_create(client, mode):
    user = client.chat.completions.create(response_model=User, messages=HELLO, **options(mode))
    assert user.age == 36


def test_create_with_completion(client, mode):
    user, raw = client.chat.completions.create_with_completion(response_model=User, messages=HELLO, **options(mode))
    assert user.age == 36
    assert raw.usage


def test_create_partial(client, mode):
    parts = list(client.chat.completions.create_partial(response_model=User, messages=HELLO, **options(mode)))
    assert parts[-1].age == 36


def test_create_iterable(client, mode):
    users = client.chat.completions.create(response_model=Iterable[User], messages=HELLO, **options(mode))
    assert [each.age for each in users]
