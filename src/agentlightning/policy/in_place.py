"""A policy over a model that the caller has loaded: its own weights are trained, and it saves as it always does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import ConfigError
from agentlightning.models import checkpoint
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy


def open_trainable(config: LocalPolicyConfig, model: Any) -> LocalPolicy:
    """A policy of a path, a transformers model or a pair `(model, tokenizer)`; weights that need no gradient, as those
    below a LoRA adapter, stay as they are. Raises ConfigError for a model that its tokenizer is not known of."""
    if isinstance(model, str | Path):
        return LocalPolicy.open(config)
    given, tokenizer = cast("tuple[Any, Any]", model) if isinstance(model, tuple) else (model, None)
    if config.lora is not None:
        raise ConfigError("lora is for a model given as a path; add the adapter to the model object, or give its path")
    name = str(getattr(given, "name_or_path", "") or "")
    found = tokenizer if tokenizer is not None else _tokenizer_of(name)
    inner = given.get_base_model() if hasattr(given, "get_base_model") else given
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(f"{type(given).__name__} wraps no transformers model that can be trained; give its path")
    return InPlacePolicy(config.model_copy(update={"model": name or "model"}), inner, found, given)


def _tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer of the model is not known ({error}); give (model, tokenizer)") from error


class InPlacePolicy(LocalPolicy):
    """Trains `inner`, the transformers model inside of `given`, and writes what `given.save_pretrained` writes."""

    def __init__(
        self, config: LocalPolicyConfig, inner: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: Any
    ) -> None:
        super().__init__(config, inner, tokenizer)
        self._given = given

    def _save(self, directory: Path, training_state: bool) -> None:
        if not training_state:
            checkpoint.save(directory, self._given, self._learner.tokenizer, None)
            return
        named = self._model.named_parameters()
        trained = {name: value.detach().clone() for name, value in named if value.requires_grad}
        directory.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": trained, "updater": self._learner.state_dict()}, directory / "state.pt")

    def _load(self, directory: Path, in_flight: bool, above: int) -> None:
        state = torch.load(directory / "state.pt", weights_only=True)
        self._prepare_weight_change(in_flight)
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, value in state["weights"].items():
                own[name].copy_(value)
        self._learner.updaters[None].load_state_dict(state["updater"]["updater"])
        self._set_version(max(self._version, above) + 1, self._learner.updaters)
