"""LangChain's standard tests of chat models, with `ChatOpenAI`."""

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class Standard(ChatModelIntegrationTests):
    """The sources of images in these tests are elsewhere in the network, and the scripted model sees none."""

    supports_json_mode = True

    @property
    def chat_model_class(self):
        return ChatOpenAI


class TestChatCompletions(Standard):
    @property
    def chat_model_params(self):
        return {"model": "policy", "stream_usage": True, "max_retries": 0}


class TestResponses(Standard):
    @property
    def chat_model_params(self):
        return {"model": "policy", "use_responses_api": True, "max_retries": 0}


@pytest.fixture(autouse=True)
def _no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
