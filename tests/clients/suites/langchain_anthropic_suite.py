"""LangChain's standard tests of chat models, with `ChatAnthropic`."""

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestMessages(ChatModelIntegrationTests):
    supports_anthropic_inputs = True

    @property
    def chat_model_class(self):
        return ChatAnthropic

    @property
    def chat_model_params(self):
        return {"model": "policy", "max_tokens": 256, "max_retries": 0}


@pytest.fixture(autouse=True)
def _no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
