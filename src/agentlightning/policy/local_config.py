"""The settings of a policy on this machine. Imports no torch, so that configuration can be read without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from agentlightning.policy.fsdp.config import RanksConfig
from agentlightning.policy.lora_config import AgentSetting, Lora, adapters_of
from agentlightning.policy.optimizer_config import Objective, OptimizerConfig
from agentlightning.policy.update.value_head_config import ValueHeadSetting
from agentlightning.util.kept_sets import MAX_SET
from agentlightning.util.settings import Section


def _text_of_path(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


ModelName: TypeAlias = Annotated[str, BeforeValidator(_text_of_path)]


class ModelSettings(Section):
    """How a model is opened, trained here or only served."""

    model: ModelName
    """See `PolicyConfig.model`."""
    name: str = "policy"
    """The model name that agents may use; the policy also answers calls for any other name."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    max_batch_size: int = Field(default=128, ge=1)
    """Answers sampled at the same time; further calls wait."""
    kv_cache_bytes: int = Field(default=4 << 30, ge=1)
    """Memory of the local engine for the keys and values of these answers; further requests wait. One answer always
    fits."""
    prefix_cache_bytes: int = Field(default=1 << 30, ge=0)
    """Memory of the local engine for cached keys and values of earlier prompts and answers."""
    max_context: int | None = Field(default=None, ge=16)
    """Tokens of prompt and answer together; None: what the model has."""
    tool_calls: str | None = None
    """How the model writes tool calls: a format's name, such as hermes, llama3 or harmony (docs/guides/offline.md).
    None: as its chat template shows; where it has no place for tools, calls or results, all of them stand in the
    messages, in Hermes' format. "messages" writes them so with any template, "template" with none."""
    lora: Lora | None = None
    """Train a low-rank adapter (LoRA) in place of all weights. None: all weights are trained."""
    max_kept_tokens: int = Field(default=1024, ge=0, le=MAX_SET)
    """The most tokens that top-p and top-k sampling may keep at a position of an answer that is trained: the sets are
    recorded, as the policy's probabilities are those over them. An answer with a larger set is refused, and counted.
    0: all such answers are."""
    value_head: ValueHeadSetting = None
    """A critic on the hidden states of the model, which the loss "value" trains: "linear", "mlp", or a table. None: no
    critic."""
    gradient_checkpointing: bool = False
    """Compute all layers but the last again in the backward pass instead of storing their activations: far less memory
    for long contexts, about a third more time."""


class LocalPolicyConfig(ModelSettings):
    """A model to open, which is not `tiny`, and the resources it may use."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """See `PolicyConfig.dtype`."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of torch."""
    prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens computed in one step, before running answers get their next token."""
    seed: int = 0
    """Of samples without a seed of their own."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    agents: dict[str, AgentSetting] = Field(default_factory=dict[str, AgentSetting])
    """What the calls of each agent train. Empty: all train the policy itself."""
    ranks: RanksConfig | None = None
    """The processes that train it. None: this process does."""
    objective: Objective = "reinforcement"
    """What it is trained for, which decides the default learning rate."""

    @property
    def adapters(self) -> dict[str, Lora]:
        """See `adapters_of`."""
        return adapters_of(self.lora, self.agents)
