"""DSPy: its adapters for chat and JSON, tools of ReAct, streaming, and its text completion."""

import asyncio
import os

import dspy
import litellm
import pytest

# DSPy asks LiteLLM what a model can; of models without an entry it expects nothing.
ABLE = {"supports_function_calling": True, "supports_response_schema": True}
litellm.register_model({"openai/policy": {"litellm_provider": "openai", "mode": "chat", **ABLE}})
BASE = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "cache": False}


def lm(**more):
    return dspy.LM("openai/policy", **BASE, **more)


class Route(dspy.Signature):
    """Route a ticket."""

    ticket: str = dspy.InputField()
    team: str = dspy.OutputField()


def test_lm():
    assert lm()("hello")[0].startswith("Hello")


def test_lm_with_several_answers():
    assert len(lm()("hello", n=2, temperature=1.0)) == 2


def test_responses():
    assert lm(model_type="responses")("hello")


def test_json_adapter():
    with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Route)(ticket="I was charged twice").team


def test_json_adapter_with_types():
    class Typed(dspy.Signature):
        """Rate a ticket."""

        ticket: str = dspy.InputField()
        urgency: int = dspy.OutputField()
        tags: list[str] = dspy.OutputField()

    with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Typed)(ticket="the number is 3")
    assert isinstance(found.urgency, int)
    assert isinstance(found.tags, list)


def test_native_tools():
    def weather(city: str) -> str:
        """The weather."""
        return f"Sunny in {city}."

    class Ask(dspy.Signature):
        """Use weather."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=lm(), adapter=adapter):
        found = dspy.Predict(Ask)(question="Use weather for 'Paris'", tools=[dspy.Tool(weather)])
    assert found.calls.tool_calls[0].name == "weather"


def test_streaming():
    async def run():
        program = dspy.streamify(dspy.Predict(Route))
        with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
            return [chunk async for chunk in program(ticket="I was charged twice")]

    assert isinstance(asyncio.run(run())[-1], dspy.Prediction)


def test_chat_adapter():
    """Needs a model that writes DSPy's own markers; the adapter then falls back to JSON."""
    with dspy.context(lm=lm(), adapter=dspy.ChatAdapter()):
        assert dspy.Predict(Route)(ticket="I was charged twice").team


def test_errors_are_typed():
    with pytest.raises(Exception, match="temperature"):
        lm(temperature=-3.0, num_retries=0)("hello")
