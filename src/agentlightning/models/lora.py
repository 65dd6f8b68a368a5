"""LoRA (arXiv 2106.09685, equation 3): several low-rank adapters over the linear layers of one model, and their files.

    y = W x + (alpha / r) B A x        A [r, in], B [out, r]; B starts at 0, so that a new adapter changes nothing

The model is not rewritten: its layers have forward hooks, and its own weights keep their names and files. A forward
pass runs with one adapter (`use`), or with one for each row of the batch (`use_rows`): each then changes its own rows.

On disk they have the format of the peft library, which transformers and vLLM load:

    DIR/adapter_config.json, adapter_model.safetensors     the adapter of the policy itself, where it has one
    DIR/adapters/AGENT/...                                 those of single agents, each a directory of the same kind
    DIR/agents.json                                        which agent learns what
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote
from warnings import catch_warnings
from zlib import crc32

import torch
from pydantic import BaseModel, Field, PositiveFloat
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models import SHARED
from agentlightning.models.checkpoint import FORWARD_ERRORS, read_tensors
from agentlightning.models.resolve import resolve_model
from agentlightning.util.settings import AtLeastOne

logger = logging.getLogger(__name__)

EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""What the layers of a single expert are called where their weights are stacked."""


class Adapter(nn.Module):
    """The matrices of one adapter: float32, whatever the precision of the model."""

    def __init__(self, layers: Mapping[str, nn.Linear], *, r: int, alpha: float, seed: int) -> None:
        super().__init__()
        self.r = r
        self.alpha = alpha
        self.layers = {name: index for index, name in enumerate(layers)}
        """By name of each layer that it changes, the place of its matrices."""
        self.targets: Mapping[str, list[str]] = {"target_modules": list(layers)}
        """These names as peft, transformers and vLLM read them from a configuration."""
        self.down = nn.ParameterList()
        """A of each layer, [r, in]."""
        self.up = nn.ParameterList()
        """B of each layer, [out, r]."""
        random = torch.Generator().manual_seed(seed)
        for layer in layers.values():
            # One on the meta device is still to get its weights.
            device = torch.device("cpu") if layer.weight.is_meta else layer.weight.device
            bound = 1 / math.sqrt(layer.in_features)  # As nn.Linear begins.
            down = torch.empty(r, layer.in_features).uniform_(-bound, bound, generator=random)
            self.down.append(down.to(device))
            self.up.append(torch.zeros(layer.out_features, r, device=device))

    @property
    def scale(self) -> float:
        return self.alpha / self.r

    def change(self, layer: str, x: Tensor) -> Tensor:
        """What it adds to the output of one of its layers for the input `x`."""
        index = self.layers[layer]
        down, up = self.down[index], self.up[index]
        return functional.linear(functional.linear(x, down.to(x.dtype)), (up * self.scale).to(x.dtype))


class Adapters:
    """The adapters of one model, whose own weights no longer change once it has one. Not thread safe."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.by_name: dict[str, Adapter] = {}
        self._hooked: set[str] = set()
        self._selected: Sequence[tuple[Adapter, Tensor | None]] = ()
        """The adapters in use, each with its rows; None: all."""

    def add(
        self,
        name: str,
        *,
        r: int,
        alpha: float,
        targets: Sequence[str] | None = None,
        seed: int = 0,
        head: bool = False,
    ) -> Adapter:
        """A new adapter over the layers that `targets` names (`find_layers`), with `head` over the output head, too.
        Raises ConfigError as `find_layers` does, and for an `r` beyond what a layer holds."""
        layers = find_layers(self.model, targets) | (_output_head(self.model) if head else {})
        narrow = [layer for layer, module in layers.items() if r > min(module.in_features, module.out_features)]
        if narrow and (targets is not None or 2 * len(narrow) >= len(layers)):
            module = layers[narrow[0]]
            sizes = sorted(min(each.in_features, each.out_features) for each in layers.values())
            raise ConfigError(
                f"r={r} of adapter {name!r} exceeds the size of {narrow[0]}, which is {module.out_features} x "
                f"{module.in_features}; use at most {sizes[len(sizes) // 2]}, far less where an adapter is to be "
                "small, or leave such layers out of targets"
            )
        if narrow:  # Gates and the like, which have no low rank.
            ends = ", ".join(sorted({layer.rpartition(".")[2] for layer in narrow}))
            logger.warning("adapter %r leaves out %d layers narrower than r=%d: %s", name, len(narrow), r, ends)
            layers = {layer: module for layer, module in layers.items() if layer not in narrow}
        self.model.requires_grad_(False)
        adapter = Adapter(layers, r=r, alpha=alpha, seed=seed + crc32(name.encode()))
        adapter.targets = _targets(self.model, layers)
        for layer in layers.keys() - self._hooked:
            layers[layer].register_forward_hook(partial(self._add_change, layer))
            self._hooked.add(layer)
        self.by_name[name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Forget an adapter. No forward pass may name it any more."""
        del self.by_name[name]

    def use(self, name: str | None) -> AbstractContextManager[None]:
        """All rows of the forward passes within use this adapter; None: none."""
        return self._selecting(() if name is None else ((self.by_name[name], None),))

    def use_rows(self, names: Sequence[str | None]) -> AbstractContextManager[None]:
        """Row i of the forward passes within uses adapter `names[i]`."""
        if len(set(names)) == 1:
            return self.use(names[0])
        rows = {each: [i for i, name in enumerate(names) if name == each] for each in names if each is not None}
        device = self.model.device
        return self._selecting([(self.by_name[name], torch.tensor(own, device=device)) for name, own in rows.items()])

    @contextmanager
    def _selecting(self, selected: Sequence[tuple[Adapter, Tensor | None]]) -> Generator[None]:
        before, self._selected = self._selected, selected
        try:
            yield
        finally:
            self._selected = before

    def _add_change(self, layer: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        for adapter, rows in self._selected:
            if layer in adapter.layers:
                change = adapter.change(layer, args[0] if rows is None else args[0][rows])
                output = output + change if rows is None else output.index_add(0, rows, change)
        return output


def find_layers(model: PreTrainedModel, targets: Sequence[str] | None = None) -> dict[str, nn.Linear]:
    """The linear layers that `targets` names by the end of their name (`q_proj`, `self_attn.q_proj`); None: all but the
    output head. Raises ConfigError for a name that no layer has."""
    head = cast("nn.Module | None", model.get_output_embeddings())
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and _is_linear(module)
    }
    ends = sorted({name.rpartition(".")[2] for name in layers})
    for target in targets or ():
        if target not in layers and not any(_ends_with(name, target) for name in layers):
            raise ConfigError(
                f"targets={list(targets or ())}: {type(model).__name__} has no linear layer {target!r}; it has "
                f"{', '.join(ends) or 'none'}"
            )
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no linear layer that an adapter could change; train it without")
    if targets is None:
        return layers
    ending = [target for target in targets if target not in layers]
    return {n: layer for n, layer in layers.items() if n in targets or any(_ends_with(n, end) for end in ending)}


def _targets(model: PreTrainedModel, layers: Mapping[str, nn.Linear]) -> Mapping[str, list[str]]:
    """The names of layers for a configuration: their ends, where no other module has the same, else their full names.

    Where transformers converts the weights of a model, peft takes the names of EXPERTS for stacked experts, whatever
    stands before them; it finds the layers by the names of their weights."""
    ends = sorted({name.rpartition(".")[2] for name in layers})
    others = (name for name, _ in model.named_modules() if name not in layers)
    names = list(layers) if any(name.rpartition(".")[2] in ends for name in others) else ends
    if get_checkpoint_conversion_mapping(model.config.model_type) is None or not EXPERTS & set(ends):
        return {"target_modules": names}
    taken = [name for name in layers if name.rpartition(".")[2] in EXPERTS]
    return {
        "target_modules": [name for name in names if name.rpartition(".")[2] not in EXPERTS],
        "target_parameters": [f"{name}.weight" for name in taken],
    }


def _is_linear(module: nn.Linear) -> bool:
    """Whether the output of a layer is that of one. The routers of some mixtures are derived from it, and choose."""
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        with torch.no_grad():
            return isinstance(module(module.weight[:1]), Tensor)
    except FORWARD_ERRORS:
        return False


def _output_head(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The output head by its name. Raises ConfigError for one that is no linear layer."""
    head = cast("nn.Module | None", model.get_output_embeddings())
    for name, module in model.named_modules():
        if module is head and isinstance(module, nn.Linear):
            return {name: module}
    raise ConfigError(f"the output head of {type(model).__name__} is no linear layer; adapt the other layers only")


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


# -- files -----------------------------------------------------------------------------------------------------------

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
AGENTS = "agents.json"
PREFIX = "base_model.model."
"""What peft writes before the name of a layer."""


class AdapterConfig(BaseModel):
    """What peft says of a plain LoRA adapter in `adapter_config.json`."""

    peft_type: Literal["LORA"]
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    r: AtLeastOne
    lora_alpha: PositiveFloat
    lora_dropout: float = 0.0
    target_modules: list[str] | None = None
    target_parameters: list[str] | None = None
    bias: Literal["none"] = "none"
    fan_in_fan_out: Literal[False] = False
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    modules_to_save: list[str] | None = Field(None, max_length=0)
    rank_pattern: dict[str, int] = Field(default_factory=dict[str, int], max_length=0)
    alpha_pattern: dict[str, float] = Field(default_factory=dict[str, float], max_length=0)
    inference_mode: bool = True

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers that it changes."""
        parameters = self.target_parameters or ()
        return (*(self.target_modules or ()), *(name.removesuffix(".weight") for name in parameters))


def adapter_directory(directory: Path, name: str) -> Path:
    """Where an adapter of a policy is, in the directory of the policy."""
    return directory if name == SHARED else directory / "adapters" / quote(name, safe=" ").replace(".", "%2E")


def write_adapter(directory: Path, adapter: Adapter, base: str) -> None:
    """Write one adapter, over a model that is a directory or hub name."""
    directory.mkdir(parents=True, exist_ok=True)
    config = AdapterConfig(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=adapter.r,
        lora_alpha=adapter.alpha,
        **cast(Any, adapter.targets),
    )
    (directory / CONFIG).write_text(config.model_dump_json(indent=2, exclude_none=True))
    save_file(named_weights(adapter), directory / WEIGHTS, metadata={"format": "pt"})


def _names(adapter: Adapter) -> dict[str, str]:
    """By the name of each matrix in a file, its name in the state of an adapter."""
    return {
        f"{PREFIX}{layer}.lora_{letter}.weight": f"{part}.{index}"
        for layer, index in adapter.layers.items()
        for part, letter in (("down", "A"), ("up", "B"))
    }


def named_weights(adapter: Adapter) -> dict[str, Tensor]:
    """The matrices by their names in a file."""
    state = adapter.state_dict()
    return {name: state[own].cpu().contiguous() for name, own in _names(adapter).items()}


def has_adapters(directory: Path) -> bool:
    """Whether a directory holds adapters and no model of its own."""
    return any((directory / name).is_file() for name in (CONFIG, AGENTS))


def read_adapter_config(directory: Path) -> AdapterConfig:
    """`adapter_config.json`. Raises PolicyError where it is missing, cannot be read, or is no plain LoRA."""
    try:
        return AdapterConfig.model_validate_json((directory / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"{directory / CONFIG} is no plain LoRA adapter that can be read: {error}; merge it into its model first,"
            " or choose another checkpoint"
        ) from error


def read_weights(directory: Path, adapter: Adapter) -> dict[str, Tensor]:
    """The matrices saved in `directory`, for `adapter.load_state_dict`. Raises PolicyError if they are damaged,
    or are those of another adapter."""
    saved = read_tensors(directory / WEIGHTS, "adapter", named_weights(adapter))
    return {own: saved[name] for name, own in _names(adapter).items()}


# -- merging ---------------------------------------------------------------------------------------------------------


def merge(adapter: Path, directory: Path) -> None:
    """Write the model with an adapter added to its weights, and its tokenizer. Raises PolicyError for adapters of
    single agents, of which a model can hold one, and for weights that do not fit."""
    if not (adapter / CONFIG).is_file() or (adapter / AGENTS).exists():
        raise PolicyError(
            f"{adapter} holds adapters of single agents, which are no one model; serve them with `agl serve --model"
            f" {adapter}`, or train with one shared adapter"
        )
    from peft import PeftModel

    base = resolve_model(str(read_adapter_config(adapter).base_model_name_or_path))
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    try:
        with catch_warnings(action="ignore", category=FutureWarning):  # peft asks for a property of an older name.
            merged: Any = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise PolicyError(f"{adapter} does not fit the weights of {base}: {error}") from error
    merged.save_pretrained(directory)
    has_own = (adapter / "tokenizer_config.json").exists()
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter if has_own else base)
    tokenizer.save_pretrained(directory)
