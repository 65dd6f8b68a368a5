"""A policy on one device of this machine: sampling and training on the same weights, in place.

`LocalPolicy` implements `policy.base.Policy`. All torch work runs in one thread (`engine.local.worker`): sampling and
training never overlap, an update happens between two tokens. Callers stay in their event loops. Whenever the weights
change, everything computed with the old ones is discarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.chat.hf import HFChatFormat
from agentlightning.engine.base import (
    DISTRIBUTION_PARAMS,
    TERMINATION_PARAMS,
    AgentEngines,
    ConstraintKind,
    OnTokens,
    Sample,
    SamplingParams,
)
from agentlightning.engine.local.guided_decoding import GrammarCompiler
from agentlightning.engine.local.kv_cache import vocab_size
from agentlightning.engine.local.scheduler import ContinuousBatcher
from agentlightning.engine.local.worker import EngineWorker
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models import checkpoint
from agentlightning.models.checkpoint import refusing
from agentlightning.models.lora import write_adapter
from agentlightning.models.resolve import shared_name
from agentlightning.policy.base import UPDATE, Capabilities, Columns, Metrics, ScoreColumn, UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, adapter_table
from agentlightning.policy.model_loading import find_device, load_model, usable_context_length, with_adapters_of
from agentlightning.policy.update.updater import LocalLearner, Updater
from agentlightning.trajectory import TokenTree, TrainingSample

RANK_STATE = "ranks"
"""In the training state of a policy that several processes train (`policy.fsdp`): the steps that they have taken."""


class LocalPolicy(AgentEngines):
    """One model on one device. Make it with `LocalPolicy.open`."""

    def __init__(
        self,
        config: LocalPolicyConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        make_updater: Callable[..., Updater] | None = Updater,
    ) -> None:
        """`make_updater`: see `LocalLearner`."""
        self.config = config
        self.model = config.name
        self.chat = HFChatFormat(tokenizer, tool_calls=config.tool_calls)
        self.context_length = usable_context_length(config, model, tokenizer)
        self.vocab_size = vocab_size(model)
        self._model = model
        self._learner = LocalLearner(model, tokenizer, config, make_updater)
        self._version = 0
        self._reads_adapters = False
        self.table = adapter_table(config.name, config.agents, config.adapters)
        self._grammars = GrammarCompiler(tokenizer, self.vocab_size, self.chat.eos_token_ids)
        self._generator = ContinuousBatcher(
            model,
            eos_token_ids=self.chat.eos_token_ids,
            decode=self.chat.decode,
            context_length=self.context_length,
            max_batch_size=config.max_batch_size,
            kv_cache_bytes=config.kv_cache_bytes,
            prefix_cache_bytes=config.prefix_cache_bytes,
            prefill_tokens=config.prefill_tokens,
            seed=config.seed,
            grammars=self._grammars,
            adapters=self._learner.adapters,
            max_kept_tokens=config.max_kept_tokens,
        )
        self._engine = EngineWorker(self._generator, threads=config.threads)

    @classmethod
    def open(cls, config: LocalPolicyConfig) -> Self:
        """Load the model, and the adapters if its directory holds some; sets torch's number of CPU threads. Raises
        ConfigError or PolicyError, naming the path."""
        config, adapters = with_adapters_of(config)
        torch.set_num_threads(config.threads)
        device = find_device(config.sampling_device)
        tokenizer, model = load_model(config)
        if len(tokenizer) > vocab_size(model):
            raise PolicyError(
                f"the tokenizer of {config.model} knows {len(tokenizer)} tokens, its model only {vocab_size(model)}; "
                "they belong to different models"
            )
        with refusing(model):
            policy = cls(config, cast(PreTrainedModel, cast(torch.nn.Module, model).to(device)), tokenizer)
        if adapters is not None:
            policy._learner.read_weights(adapters)()
            policy._reads_adapters = True
        return policy

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def supported_params(self) -> frozenset[str]:
        """See `Engine.supported_params`."""
        return frozenset([*DISTRIBUTION_PARAMS, *TERMINATION_PARAMS])

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return await asyncio.to_thread(self._grammars.can_compile, text, kind)

    def version_of(self, adapter: str | None) -> int:
        """See `AgentEngines.version_of`."""
        return self._generator.version_of(adapter)

    @property
    def capabilities(self) -> Capabilities:
        adapters = self.config.adapters
        starts_at_base = bool(adapters) and not self._reads_adapters
        return Capabilities(in_flight=True, lends_weights=True, starts_at_base=starts_at_base, adapters=adapters)

    async def save_adapter(self, name: str, directory: Path) -> None:
        """Write an adapter as a directory in peft's format."""
        adapter, base = self._learner.by_name[name], self.config.model
        await self._engine.run(lambda: write_adapter(directory, adapter, shared_name(base)))

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `AgentEngines.sample_adapter`. Raises ConfigError for invalid params, PolicyError if the model failed."""
        return await self._engine.sample(prompt_token_ids, params, on_tokens, adapter)

    async def kv_cache_usage(self) -> float | None:
        """See `Policy.kv_cache_usage`."""
        return self._generator.kv_cache_usage

    @property
    def device(self) -> str:
        return str(self._model.device)

    async def lend(self, use: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
        """Call `use(weights)`, named as in a checkpoint, in the worker thread, where nothing changes them meanwhile.
        Raises PolicyError for whatever it raises."""
        await self._engine.run(lambda: use(checkpoint.named_weights(self._model)))

    async def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE, *, in_flight: bool = False
    ) -> Metrics:
        """See `Policy.train` and `Updater.step`. Raises as both do."""
        return await self._engine.run(lambda: self._train(samples, in_flight, options))

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """See `Policy.score`. The model in `reference` is loaded beside the policy, may have another shape, and stays
        until two others are. Where adapters are trained, the weights below them are the reference unless another is
        given."""
        return await self._engine.run(lambda: self._learner.score(trees, what, reference, adapter))

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        await self._engine.run(lambda: self._save(Path(directory), training_state))

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`. Raises PolicyError or ConfigError for a checkpoint that is damaged or incompatible, before
        anything changes."""
        await self._engine.run(lambda: self._load(Path(directory), in_flight, above))

    async def close(self) -> None:
        await self._engine.close()

    # -- in the worker thread --------------------------------------------------------------------------------------

    def _prepare_weight_change(self, in_flight: bool, adapters: Collection[str | None] | None = None) -> None:
        self._generator.invalidate_cache(in_flight=in_flight, adapters=adapters)
        if self._model.device.type != "cpu":  # Training needs this memory.
            self._generator.release_memory()

    def _train(self, samples: Sequence[TrainingSample], in_flight: bool, options: UpdateOptions) -> dict[str, float]:
        try:
            return self._learner.update(samples, options, partial(self._prepare_weight_change, in_flight))
        finally:
            if self._learner.changed:
                self._set_version(self._version + 1, self._learner.changed)

    def _set_version(self, version: int, names: Iterable[str | None]) -> None:
        """The weights of these names have changed."""
        self._version = version
        for name in names:
            if name is None:
                self._generator.policy_version = version
            else:
                self._generator.adapter_versions[name] = version

    def _save(self, directory: Path, training_state: bool) -> None:
        state = {**self._own_state(), **self._learner.state_dict()} if training_state else None
        self._learner.save(directory, state)

    def _own_state(self) -> dict[str, Any]:
        """All that a resume needs beside the weights and their optimisers."""
        return {
            "policy_version": self._version,
            "generator": self._generator.state_dict(),
            "torch_random": torch.get_rng_state(),
        }

    def _load(self, directory: Path, in_flight: bool, above: int) -> None:
        state = checkpoint.load_state(directory)
        if RANK_STATE in state:
            raise PolicyError(
                f'{directory} was saved by policy.kind = "fsdp"; continue with that, or start a new run from its'
                " weights with policy.model"
            )
        self._resume(state, in_flight, above, self._learner.read(directory, state))

    def _resume(self, state: Mapping[str, Any], in_flight: bool, above: int, load: Callable[[], None]) -> None:
        """Continue with the weights that `load` puts in place."""
        generator, random = state["generator"], state["torch_random"]
        version = max(self._version, int(state["policy_version"]), above) + 1
        # Everything that can be rejected is checked above, before anything changes.
        self._prepare_weight_change(in_flight)
        try:
            load()
            self._generator.load_state_dict(generator)
            torch.set_rng_state(random)
        finally:
            self._set_version(version, self.config.adapters or (None,))


# -- a model of the caller's ------------------------------------------------------------------------------------------


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
        writers, state = [self._learner.tokenizer.save_pretrained, self._given.save_pretrained], None
        if training_state:  # What was given may be an adapter, or hold its weights in a form of its own.
            writers.pop()
            named = self._model.named_parameters()
            trained = {name: value.detach() for name, value in named if value.requires_grad}
            state = {**self._own_state(), **self._learner.state_dict(), "weights": trained}
        checkpoint.save(directory, state, *writers)

    def _load(self, directory: Path, in_flight: bool, above: int) -> None:
        state = checkpoint.load_state(directory)

        def load() -> None:
            self._model.load_state_dict(state["weights"], strict=False)
            self._learner.updaters[None].load_state_dict(state["updater"])

        self._resume(state, in_flight, above, load)
