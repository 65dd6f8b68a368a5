"""The settings of a policy on this machine. Imports no torch, so that configuration can be read without it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agentlightning.policy.fsdp.config import RanksConfig
from agentlightning.policy.lora_config import AgentSetting, Lora
from agentlightning.policy.optimizer_config import Objective, OptimizerConfig
from agentlightning.policy.update.value_head_config import ValueHeadSetting
from agentlightning.util.kept_sets import MAX_SET


class LocalPolicyConfig(BaseModel):
    """A model to open, and the resources it may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | Path
    """See `PolicyConfig.model`, without `tiny`."""
    name: str = "policy"
    """The model name agents ask for."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto takes an accelerator where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are sampled from. bfloat16 samples with half the memory; it is trained through master copies
    in float32, which cost 4 bytes a weight more."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of torch. More than 1 helps only on cores that nothing else uses."""
    max_batch_size: int = Field(default=128, ge=1)
    """Answers sampled at the same time; further requests wait."""
    kv_cache_bytes: int = Field(default=4 << 30, ge=1)
    """Memory for the keys and values of these answers; further requests wait. One answer always fits."""
    prefix_cache_bytes: int = Field(default=1 << 30, ge=0)
    """Memory for the cached keys and values of earlier prompts and answers."""
    prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens computed in one step, before running answers get their next token."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt and answer together, in tokens; None: all that the model can hold."""
    tool_calls: str | None = None
    """See `PolicyConfig.tool_calls`."""
    value_head: ValueHeadSetting = None
    """A critic on the hidden states of the model, which the loss "value" trains: "linear", "mlp", or a table. None: no
    critic."""
    gradient_checkpointing: bool = False
    """Compute all layers but the last again in the backward pass instead of storing their activations: far less memory
    for long contexts, about a third more time."""
    max_kept_tokens: int = Field(default=1024, ge=0, le=MAX_SET)
    """The most tokens that top-p and top-k sampling may keep at a position for the set of them to be recorded, which
    training on such an answer needs. An answer with a larger set is refused. 0: none is recorded."""
    seed: int = 0
    """Of samples without a seed of their own."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lora: Lora | None = None
    """Train an adapter of this shape in place of all weights."""
    agents: dict[str, AgentSetting] = Field(default_factory=dict[str, AgentSetting])
    """What the calls of each agent train. Empty: all train the policy itself."""
    ranks: RanksConfig | None = None
    """The processes that train it. None: this process does."""
    objective: Objective = "reinforcement"
    """What it is trained for, which decides the default learning rate."""
