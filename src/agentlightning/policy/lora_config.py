"""The settings of adapters: LoRA of the whole policy, and what each agent of a rollout learns. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from agentlightning.engine.adapter_view import AdapterTable
from agentlightning.engine.servers.config import ServersConfig, smallest_lora_rank
from agentlightning.errors import ConfigError
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.weight_sync.select import AUTO, DISK

SHARED: Final = "shared"
"""The name of the adapter of the policy itself."""
BASE: Final = "base"
"""The name that stands for the weights below all adapters."""
LR_FACTOR: Final = 10.0
"""The default learning rate of an adapter, as a multiple of that of all weights (Schulman et al. 2025, "LoRA without
regret")."""


class Lora(BaseModel):
    """Train a low-rank adapter in place of all weights (LoRA, arXiv 2106.09685).

    >>> agl.Lora(r=8, targets=("q_proj", "v_proj")).r
    8
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: Literal["lora"] = "lora"
    """Which kind of adapter this is."""
    r: int = Field(default=16, ge=1)
    """The rank: rows of A and columns of B."""
    alpha: float | None = Field(default=None, gt=0)
    """What the adapter adds is multiplied by alpha / r. None: 2 r."""
    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The linear layers to change, by the end of their names: `("q_proj", "v_proj")`. None: all but the output head."""
    optimizer: OptimizerConfig | None = None
    """How this adapter is updated. None: as the algorithm's `optimizer` says. Without a learning rate it has ten times
    the default of training all weights."""

    @property
    def scale_numerator(self) -> float:
        """`alpha` with its default."""
        return 2.0 * self.r if self.alpha is None else self.alpha


AgentSetting: TypeAlias = Annotated[Lora | Literal["frozen", "shared"], Field(union_mode="left_to_right")]
"""What the calls of an agent train: an adapter of its own, nothing, or what all `shared` agents train together."""


def adapters_of(lora: Lora | None, agents: Mapping[str, AgentSetting]) -> dict[str, Lora]:
    """The adapters by name: `SHARED` for the policy itself, and those of single agents. Empty: all weights are trained.

    Where other agents rely on the weights below, `shared` agents train a common adapter, so that those weights stay as
    they are. Raises ConfigError where nothing would be trained."""
    own = {name: setting for name, setting in agents.items() if isinstance(setting, Lora)}
    if reserved := sorted({SHARED, BASE} & own.keys()):
        raise ConfigError(f"the agent name {reserved[0]!r} is reserved for the policy's own weights; rename the agent")
    shared = not agents or SHARED in agents.values()
    if agents and not own and not shared:
        raise ConfigError(
            f"agents={dict(agents)} freezes every agent, so there is nothing to train; give one an adapter (Lora) or "
            'make it "shared"'
        )
    if lora is not None and not shared:
        raise ConfigError(
            f'policy.lora is the adapter of shared agents, and no agent of {sorted(agents)} is; make one "shared", or '
            "leave policy.lora out"
        )
    if lora is None and agents and shared and set(agents.values()) != {"shared"}:
        lora = Lora()
    return ({} if lora is None else {SHARED: lora}) | own


def adapter_table(model: str, agents: Mapping[str, AgentSetting], adapters: Collection[str]) -> AdapterTable:
    """What answers which agent: `MODEL:AGENT` one with an adapter of its own, and `MODEL:base`, the weights below a
    common adapter, those that are frozen or not listed."""
    views: dict[str, str | None] = {f"{model}:{name}": name for name in adapters if name != SHARED}
    base = f"{model}:{BASE}" if agents and SHARED in adapters else model
    if base != model:
        views[base] = None

    def name_of(agent: str, setting: AgentSetting) -> str:
        return f"{model}:{agent}" if isinstance(setting, Lora) else model if setting == "shared" else base

    names = {agent: name_of(agent, setting) for agent, setting in agents.items()}
    return AdapterTable(own=SHARED if SHARED in adapters else None, views=views, agents=names, others=base)


def check_servable(adapters: Mapping[str, Lora], servers: ServersConfig, kind: str) -> None:
    """Raises ConfigError for adapters that servers of this kind cannot get in the configured way, or cannot run."""
    if not adapters:
        return
    if servers.transfer not in (DISK, AUTO):
        raise ConfigError(
            f'transfer="{servers.transfer}" is for all weights; servers read adapters from the disk, so set '
            f'policy.servers.transfer = "{DISK}" or leave policy.lora and algorithm.agents out'
        )
    if kind == "vllm":
        smallest_lora_rank(max(lora.r for lora in adapters.values()))
