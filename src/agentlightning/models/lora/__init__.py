"""LoRA adapters: low-rank changes of a model's linear layers, and their files."""

from agentlightning.models.lora.adapters import Adapter, Adapters, find_layers
from agentlightning.models.lora.files import AdapterFiles, has_adapters, read_weights, set_weights

__all__ = ["Adapter", "AdapterFiles", "Adapters", "find_layers", "has_adapters", "read_weights", "set_weights"]
