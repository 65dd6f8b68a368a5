"""A model that cannot be sampled from here is refused when it is opened, by what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models import zoo
from tests.support.models import model_tokenizer

from agentlightning.errors import PolicyError
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("architecture", "lack"),
    [
        ("llama4_text", "Llama4ForCausalLM has layers of kind chunked_attention"),
        ("openai-gpt", "OpenAIGPTLMHeadModel does not fill the cache of keys and values"),
        ("rwkv", "RwkvForCausalLM does not fill the cache of keys and values"),
    ],
)
def test_the_error_names_what_the_model_lacks(architecture: str, lack: str, tmp_path: Path) -> None:
    zoo.tiny(architecture).save_pretrained(tmp_path)
    model_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match=lack):
        LocalPolicy.open(LocalPolicyConfig(model=str(tmp_path), device="cpu"))
