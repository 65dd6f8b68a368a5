"""A policy on one device of this machine: sampling and training on the same weights, in place.

`LocalPolicy` fulfils `policy.base.Policy`. All torch work happens in one thread (`policy.engine`), so sampling and
training never meet: an update happens between two tokens. Callers stay in their event loops. With each change of the
weights everything computed with the old ones is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.chat.hf import HFChatFormat
from agentlightning.engine.base import DISTRIBUTION_PARAMS, TERMINATION_PARAMS, ConstraintKind, Sample, SamplingParams
from agentlightning.engine.local.guided_decoding import GrammarCompiler
from agentlightning.engine.local.kv_cache import vocab_size
from agentlightning.engine.local.scheduler import ContinuousBatcher
from agentlightning.engine.local.worker import EngineWorker
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy import checkpoint
from agentlightning.policy.optimizer_config import Objective, OptimizerConfig
from agentlightning.policy.updater import Updater
from agentlightning.trajectory import TrainingSample

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


class LocalPolicyConfig(BaseModel):
    """What model to open, and what it may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | Path
    """A directory that `transformers` loads as a causal language model with a chat template, or a name on the hub."""
    name: str = "policy"
    """The model name agents ask for."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto takes an accelerator where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are sampled from. bfloat16 samples with half the memory; it is trained through master copies
    in float32, which cost 4 bytes a weight more."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of torch. More than 1 pays only on cores that nothing else uses."""
    max_batch_size: int = Field(default=128, ge=1)
    """How many answers are drawn at the same time; further requests wait."""
    kv_cache_bytes: int = Field(default=4 << 30, ge=1)
    """Memory for the keys and values of these answers; further requests wait. One answer is always drawn."""
    prefix_cache_bytes: int = Field(default=1 << 30, ge=0)
    """Memory for keys and values of earlier prompts and answers, so that they are not computed again."""
    prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens computed before those who are answering get their next token."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt and answer together, in tokens; None: all that the model can hold."""
    tool_calls: str | None = None
    """The format of its tool calls, a key of `policy.tool_calls.FORMATS`; None: as its chat template shows."""
    seed: int = 0
    """Of the draws that have no seed of their own."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    objective: Objective = "reinforcement"
    """What it is opened for: decides the learning rate where the optimiser's is left open."""


class LocalPolicy:
    """One model on one device. Make it with `LocalPolicy.open`."""

    def __init__(self, config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.model = config.name
        self.chat = HFChatFormat(tokenizer, tool_calls=config.tool_calls)
        self.context_length = _context_length(config, model, tokenizer)
        self.vocab_size = vocab_size(model)
        self._model = model
        self._tokenizer = tokenizer  # Used in the engine's thread alone; `chat` has its own copy.
        self._version = 0
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
        device = _device(config.device)
        tokenizer, model = _load(config)
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
        """See `Engine.sample`. Raises ConfigError for impossible params, PolicyError where the model failed."""
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
        """`use(weights)`, named as in a checkpoint, in the engine's thread: nothing changes them meanwhile. Raises
        PolicyError for whatever it raises."""
        await self._engine.run(lambda: use(checkpoint.named_weights(self._model)))

    @property
    def can_update_in_flight(self) -> bool:
        return True

    async def train(
        self, samples: Sequence[TrainingSample], *, in_flight: bool = False, **options: Any
    ) -> Mapping[str, float]:
        """`Updater.step(samples, **options)`; see `Policy.train`. Raises as both do."""
        return await self._engine.run(lambda: self._train(samples, in_flight, options))

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        await self._engine.run(lambda: self._save(Path(directory), training_state))

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`. What is damaged or does not fit is refused with PolicyError or ConfigError, and nothing
        has changed then."""
        await self._engine.run(lambda: self._load(Path(directory), in_flight, above))

    async def close(self) -> None:
        await self._engine.close()

    # -- in the engine's thread ------------------------------------------------------------------------------------

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def _weights_change(self, in_flight: bool) -> None:
        self._generator.invalidate_cache(in_flight=in_flight)
        if self._model.device.type != "cpu":  # Training needs the memory more.
            self._generator.release_memory()

    def _train(
        self, samples: Sequence[TrainingSample], in_flight: bool, options: Mapping[str, Any]
    ) -> dict[str, float]:
        self._weights_change(in_flight)
        steps = self._updater.optimizer.steps
        try:
            metrics = self._updater.step(samples, **options)
        except BaseException:
            self._updater.optimizer.zero_grad()  # What was accumulated must not leak into the next step.
            if self._updater.optimizer.steps > steps:  # A later minibatch failed: the weights are new ones.
                self._set_version(self._version + 1)
            raise
        self._set_version(self._version + 1)
        return metrics

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
        # Nothing has changed so far: what is refused above leaves the policy as it was.
        self._weights_change(in_flight)
        try:
            self._model.load_state_dict(weights)
            self._updater.load_state_dict(updater)
            self._generator.load_state_dict(generator)
            torch.set_rng_state(random)
        finally:
            self._set_version(version)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f'device="{name}" cannot be used: {error}; use "auto" or "cpu"') from error
    return device


def _load(config: LocalPolicyConfig) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    path = Path(config.model)
    if not path.is_dir() and (path.is_absolute() or path.exists() or str(config.model).count("/") > 1):
        raise PolicyError(f"model={config.model} is not a directory; give one that holds config.json and weights")
    if path.is_dir() and not any((path / name).exists() for name in TOKENIZER_FILES):
        raise PolicyError(f"{path} holds no tokenizer; save the model's tokenizer there with tokenizer.save_pretrained")
    source = str(config.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        with checkpoint.without_bars():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, config.dtype))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise PolicyError(
            f"model={config.model} cannot be loaded as a causal language model with a tokenizer: {error}; give a "
            "directory written by save_pretrained, or a name on the hub that this machine can reach"
        ) from error
    return tokenizer, model


def _context_length(config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    text_config = model.config.get_text_config(decoder=True)
    most = getattr(text_config, "max_position_embeddings", None) or tokenizer.model_max_length
    faithful, kind = _faithful_length(text_config, most)
    if config.max_context is not None and config.max_context > faithful:
        reason = f" faithfully: beyond, {kind} RoPE changes what was computed before" if faithful < most else ""
        raise ConfigError(
            f"max_context={config.max_context} exceeds what {config.model} can hold{reason}; use at most {faithful}"
        )
    if config.max_context is None and faithful < most:
        logger.warning(
            "%s is used up to %d of its %d tokens: beyond, %s RoPE turns every earlier position otherwise, so that "
            "tokens would be drawn from one distribution and trained under another",
            config.model, faithful, most, kind,
        )  # fmt: skip
    return min(config.max_context or faithful, faithful)


def _faithful_length(text_config: Any, most: int) -> tuple[int, str]:
    """How long a sequence may be while every key stays what it was when it was computed, and the kind of RoPE.

    LongRoPE has other frequencies for all positions once a sequence is past the original length, those of keys in a
    cache included. Dynamic RoPE has them past `max_position_embeddings`, which no sequence is here.
    """
    parameters: dict[str, Any] = getattr(text_config, "rope_parameters", None) or {}
    for rope in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
        if rope.get("rope_type") == "longrope":
            return min(most, int(rope.get("original_max_position_embeddings") or most)), "longrope"
    return most, "default"
