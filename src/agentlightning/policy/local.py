"""A policy on one device of this machine: sampling and training on the same weights, in place.

`LocalPolicy` implements `policy.base.Policy`. All torch work runs in one thread (`engine.local.worker`): sampling and
training never overlap, an update happens between two tokens. Callers stay in their event loops. Whenever the weights
change, everything computed with the old ones is discarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.chat.hf import HFChatFormat
from agentlightning.engine.base import DISTRIBUTION_PARAMS, TERMINATION_PARAMS, ConstraintKind, Sample, SamplingParams
from agentlightning.engine.local.guided_decoding import GrammarCompiler
from agentlightning.engine.local.kv_cache import vocab_size
from agentlightning.engine.local.scheduler import ContinuousBatcher
from agentlightning.engine.local.worker import EngineWorker
from agentlightning.errors import PolicyError
from agentlightning.models import checkpoint
from agentlightning.policy.base import Columns, ScoreColumn
from agentlightning.policy.local_config import LocalPolicyConfig
from agentlightning.policy.model_loading import find_device, load_model, usable_context_length
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.updater import Updater
from agentlightning.trajectory import TokenTree, TrainingSample


class LocalPolicy:
    """One model on one device. Make it with `LocalPolicy.open`."""

    def __init__(self, config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.model = config.name
        self.chat = HFChatFormat(tokenizer, tool_calls=config.tool_calls)
        self.context_length = usable_context_length(config, model, tokenizer)
        self.vocab_size = vocab_size(model)
        self._model = model
        self._tokenizer = tokenizer  # Only for the worker thread; `chat` has its own copy.
        self._version = 0
        self._reference: tuple[Path, Forward] | None = None
        optimizer = config.optimizer.completed(weights=model.num_parameters(), objective=config.objective)
        self._updater = Updater(model, optimizer)
        self._grammars = GrammarCompiler(tokenizer, self.vocab_size, self.chat.eos_token_ids)
        self._generator = ContinuousBatcher(
            model,
            eos_token_ids=self.chat.eos_token_ids,
            decode=self._decode,
            context_length=self.context_length,
            max_batch_size=config.max_batch_size,
            kv_cache_bytes=config.kv_cache_bytes,
            prefix_cache_bytes=config.prefix_cache_bytes,
            prefill_tokens=config.prefill_tokens,
            seed=config.seed,
            grammars=self._grammars,
        )
        self._engine = EngineWorker(self._generator, threads=config.threads)

    @classmethod
    def open(cls, config: LocalPolicyConfig) -> LocalPolicy:
        """Load the model; sets torch's number of CPU threads. Raises ConfigError or PolicyError, naming the path."""
        torch.set_num_threads(config.threads)
        device = find_device(config.device)
        tokenizer, model = load_model(config)
        if len(tokenizer) > vocab_size(model):
            raise PolicyError(
                f"the tokenizer of {config.model} knows {len(tokenizer)} tokens, its model only {vocab_size(model)}; "
                "they belong to different models"
            )
        return cls(config, cast(PreTrainedModel, cast(torch.nn.Module, model).to(device)), tokenizer)

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

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`. Raises ConfigError for invalid params, and PolicyError if the model failed."""
        request = await self._engine.sample(prompt_token_ids, params, on_tokens)
        assert request.finish_reason is not None
        return Sample(
            token_ids=tuple(request.sampled),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish_reason,
            policy_version=request.policy_version,
            versions=request.versions,
            top_logprobs=tuple(request.top_logprobs),
        )

    @property
    def device(self) -> str:
        return str(self._model.device)

    async def lend(self, use: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
        """Call `use(weights)`, named as in a checkpoint, in the worker thread, where nothing changes them meanwhile.
        Raises PolicyError for whatever it raises."""
        await self._engine.run(lambda: use(checkpoint.named_weights(self._model)))

    @property
    def can_update_in_flight(self) -> bool:
        return True

    async def train(
        self, samples: Sequence[TrainingSample], *, in_flight: bool = False, **options: Any
    ) -> Mapping[str, float]:
        """`Updater.step(samples, **options)`; see `Policy.train`. Raises as both do."""
        return await self._engine.run(lambda: self._train(samples, in_flight, options))

    async def score(
        self, trees: Sequence[TokenTree], what: AbstractSet[ScoreColumn], *, reference: Path | None = None
    ) -> Columns:
        """See `Policy.score`. The model in `reference` is loaded beside the policy, and stays until another one is."""
        if "values" in what:
            raise PolicyError('"values" need a value head, which a local policy does not have; ask for other columns')
        if "ref_logprobs" in what and reference is None:
            raise PolicyError('"ref_logprobs" need a reference; give the directory of the reference model')
        return await self._engine.run(lambda: self._score(trees, what, reference))

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        await self._engine.run(lambda: self._save(Path(directory), training_state))

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`. Raises PolicyError or ConfigError for a checkpoint that is damaged or incompatible, before
        anything changes."""
        await self._engine.run(lambda: self._load(Path(directory), in_flight, above))

    async def close(self) -> None:
        await self._engine.close()

    # -- in the worker thread --------------------------------------------------------------------------------------

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def _prepare_weight_change(self, in_flight: bool) -> None:
        self._generator.invalidate_cache(in_flight=in_flight)
        if self._model.device.type != "cpu":  # Training needs this memory.
            self._generator.release_memory()

    def _train(
        self, samples: Sequence[TrainingSample], in_flight: bool, options: Mapping[str, Any]
    ) -> dict[str, float]:
        self._prepare_weight_change(in_flight)
        steps = self._updater.optimizer.steps
        try:
            metrics = self._updater.step(samples, **options)
        except BaseException:
            self._updater.optimizer.zero_grad()  # The next step must not start from these gradients.
            if self._updater.optimizer.steps > steps:  # A later minibatch failed: the weights have changed.
                self._set_version(self._version + 1)
            raise
        self._set_version(self._version + 1)
        return metrics

    def _score(self, trees: Sequence[TokenTree], what: AbstractSet[ScoreColumn], reference: Path | None) -> Columns:
        found: dict[str, Any] = {}
        if what & {"logprobs", "entropy"}:
            found |= self._updater.forward.score(trees)
        if "ref_logprobs" in what and reference is not None:
            found["ref_logprobs"] = self._reference_at(reference).score(trees)["logprobs"]
        return {name: columns for name, columns in found.items() if name in what}

    def _reference_at(self, directory: Path) -> Forward:
        directory = directory.absolute()
        if self._reference is None or self._reference[0] != directory:
            self._reference = None  # Frees its memory before the next one is loaded.
            model = cast("torch.nn.Module", checkpoint.read_model(directory, self._model).eval())
            self._reference = directory, Forward(cast(PreTrainedModel, model.to(self._model.device)))
        return self._reference[1]

    def _set_version(self, version: int) -> None:
        self._version = self._generator.policy_version = version

    def _save(self, directory: Path, training_state: bool) -> None:
        state = None
        if training_state:
            state = {
                "policy_version": self._version,
                "updater": self._updater.state_dict(),
                "generator": self._generator.state_dict(),
                "torch_random": torch.get_rng_state(),
            }
        checkpoint.save(directory, self._model, self._tokenizer, state)

    def _load(self, directory: Path, in_flight: bool, above: int) -> None:
        state = checkpoint.load_state(directory)
        weights = checkpoint.read_weights(directory, self._model)
        updater, generator, random = state["updater"], state["generator"], state["torch_random"]
        version = max(self._version, int(state["policy_version"]), above) + 1
        self._updater.check_state_dict(updater)
        # Everything that can be rejected is checked above, before anything changes.
        self._prepare_weight_change(in_flight)
        try:
            self._model.load_state_dict(weights)
            self._updater.load_state_dict(updater)
            self._generator.load_state_dict(generator)
            torch.set_rng_state(random)
        finally:
            self._set_version(version)
