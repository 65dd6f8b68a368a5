"""A policy whose weights are on a server of the Tinker API: the hosted service, SkyRL's, or `agl serve --tinker`.

`TinkerPolicy` implements `policy.base.Policy`. Each update ends with a copy of the weights that is sampled from;
answers in progress end on the copy that they began with. A checkpoint holds the path of the weights on the server,
where they stay; `load` goes on from them in a new training run there, also after the server was started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from pydantic import BaseModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentlightning.chat.hf import HFChatFormat
from agentlightning.engine.base import ConstraintKind, OnTokens, Sample, SamplingParams, room_for_answer
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models import checkpoint
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.base import UPDATE, Capabilities, Columns, ScoreColumn, UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora, TinkerConfig
from agentlightning.trajectory import TokenTree, TrainingSample
from agentlightning_tinker.session import TinkerSession
from agentlightning_tinker.updater import RemoteUpdater, check_adapter, check_sampling

CHECKPOINT: Final = "tinker.json"
DEFAULT_CONTEXT: Final = 32768


class TinkerPolicy:
    """One adapter on a server. Make it with `TinkerPolicy.open`."""

    capabilities = Capabilities(in_flight=True, starts_at_base=True)
    supported_params = frozenset({"stop_token_ids", "ignore_eos"})

    def __init__(
        self, config: LocalPolicyConfig, lora: Lora, tokenizer: PreTrainedTokenizerBase, session: TinkerSession
    ) -> None:
        self.config, self.model = config, config.name
        self.chat = HFChatFormat(tokenizer, tool_calls=config.tool_calls)
        self.context_length = config.max_context or min(int(tokenizer.model_max_length), DEFAULT_CONTEXT)
        self.vocab_size: int | None = len(tokenizer)
        self._session, self._updater = session, RemoteUpdater(session, lora.optimizer or config.optimizer)
        self._version = 0
        self._sampler: Any = None
        self._changing = asyncio.Lock()
        """Held while the weights change."""

    @classmethod
    async def open(cls, config: LocalPolicyConfig, server: TinkerConfig) -> TinkerPolicy:
        """Begin a training run on the server. Raises PolicyError for a server that cannot be used, and ConfigError for
        settings that the API lacks."""
        lora = check_config(config)
        tokenizer = await asyncio.to_thread(_tokenizer, config)
        session = await TinkerSession.open(server, config.model)
        try:
            policy = cls(config, lora, tokenizer, session)
            await session.begin(lora.r, config.seed)
            await policy._publish(0)
        except BaseException:
            await session.close("errored")
            raise
        return policy

    # -- sampling --------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self._version

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return False

    async def kv_cache_usage(self) -> float | None:
        """See `Policy.kv_cache_usage`."""
        return None

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`; the tokens come at once. Raises ConfigError for params that the API lacks, PolicyError
        where the server fails."""
        if lacking := params.unsupported(self.supported_params):
            raise ConfigError(
                f"the Tinker API has no {', '.join(lacking)}; leave {'it' if len(lacking) == 1 else 'them'} out"
            )
        room = room_for_answer(prompt_token_ids, self.context_length, params.max_tokens)
        wanted = replace(params, max_tokens=room)
        version = self._version
        found = await self._session.sample(self._sampler, prompt_token_ids, wanted, self._stop(params))
        tokens, logprobs = tuple(int(token) for token in found.tokens), tuple(map(float, found.logprobs or ()))
        if len(logprobs) != len(tokens):
            raise PolicyError(
                f"the server gave {len(logprobs)} log-probabilities for {len(tokens)} tokens; training needs one each"
            )
        top = tuple(tuple((int(t), float(p)) for t, p in row or ()) for row in found.topk_logprobs or ())
        if on_tokens is not None:
            on_tokens(tokens, *((logprobs, top) if params.stream_logprobs else ()))
        return Sample(tokens, logprobs, "stop" if found.stop_reason == "stop" else "length", version, top_logprobs=top)

    def _stop(self, params: SamplingParams) -> list[int] | list[str] | None:
        """What ends an answer, in the API's form: all of it as tokens, or all of it as texts. Raises ConfigError for
        both."""
        if params.ignore_eos and not params.stop and not params.stop_token_ids:
            return []
        ends = sorted(params.end_tokens(self.chat.eos_token_ids))
        if params.stop:
            return [*params.stop, *(self.chat.decode([token]) for token in ends)]
        return ends if params.stop_token_ids else None

    # -- learning --------------------------------------------------------------------------------------------------

    async def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE, *, in_flight: bool = False
    ) -> Mapping[str, float]:
        """See `Policy.train` and `RemoteUpdater.step`. Raises as both do."""
        async with self._changing:
            metrics = await asyncio.to_thread(lambda: self._updater.step(samples, options))
            await self._publish(self._version + 1)
        return metrics

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """See `Policy.score`. The API gives `logprobs`, and `ref_logprobs` of the model below the adapter."""
        check_adapter(adapter)
        if lacking := sorted(what - {"logprobs", "ref_logprobs"}):
            raise PolicyError(f"the Tinker API cannot give {', '.join(lacking)}; it has log-probabilities alone")
        if reference is not None:
            raise PolicyError(
                f"the reference {reference} is on this machine, and the policy on a server of the Tinker API; leave it"
                " out for the model below the adapter"
            )
        for tree in trees:
            check_sampling(tree)
        score = self._updater.logprobs
        return {name: await asyncio.to_thread(score, trees, of_base=name == "ref_logprobs") for name in sorted(what)}

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        """Save weights and optimiser on the server, and where they are in `directory`, with the tokenizer. A checkpoint
        without `training_state` is the same: the weights are on the server."""
        async with self._changing:
            path = await self._session.save(f"agl-{self._version:06d}-{token_hex(4)}")
            about = Checkpoint(
                path=path,
                base_model=self._session.base_model,
                policy_version=self._version,
                **self._updater.state_dict(),
            )
            await asyncio.to_thread(
                checkpoint.save,
                Path(directory),
                None,
                self.chat.save_tokenizer,
                lambda new: (new / CHECKPOINT).write_text(about.model_dump_json(indent=2)),
            )

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`. Raises PolicyError where the server no longer has the weights."""
        about = await asyncio.to_thread(read_checkpoint, Path(directory))
        if about.base_model != self._session.base_model:
            raise PolicyError(
                f"{directory} is of the model {about.base_model!r}, and {self._session.base_model!r} is trained"
                " here; continue with the model it was saved from"
            )
        async with self._changing:
            await self._session.load(about.path)
            self._updater.load_state_dict(about.model_dump())
            await self._publish(max(self._version, about.policy_version, above) + 1)

    async def _publish(self, version: int) -> None:
        """Sample from the weights as they are now, from here on."""
        self._sampler = await self._session.sampler()
        self._version = version

    async def close(self) -> None:
        await self._session.close()


class Checkpoint(BaseModel):
    """Where the weights are, and the state of the updater."""

    path: str
    base_model: str
    policy_version: int
    steps: int
    entropy: tuple[float, int] = (0.0, 0)


def read_checkpoint(directory: Path) -> Checkpoint:
    """What `TinkerPolicy.save` wrote. Raises PolicyError."""
    try:
        return Checkpoint.model_validate_json((directory / CHECKPOINT).read_bytes())
    except (OSError, ValueError) as error:
        raise PolicyError(
            f'{directory} holds no checkpoint of policy.kind = "tinker": {error}; choose another checkpoint'
        ) from error


def check_config(config: LocalPolicyConfig) -> Lora:
    """The adapter to train. Raises ConfigError for settings that the API cannot express, naming each."""
    lora, trained = config.lora, 'policy.kind = "tinker"'
    if lora is None:
        raise ConfigError(f"{trained} trains an adapter: set policy.lora, such as {{ r = 32 }}")
    wrong = {
        "policy.lora.alpha": lora.alpha is not None,
        "policy.lora.targets": lora.targets is not None,
        "algorithm.agents": bool(config.agents),
        "policy.value_head": config.value_head is not None,
        "policy.gradient_checkpointing": config.gradient_checkpointing,
    }
    if named := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(
            f"{', '.join(named)}: the Tinker API cannot express this (which layers an adapter has is set by"
            f" policy.tinker.attention, mlp and head); leave it out with {trained}"
        )
    return lora


def _tokenizer(config: LocalPolicyConfig) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(resolve_model(config.model, weights=False))
    except (OSError, ValueError, KeyError) as error:
        raise PolicyError(
            f"policy.model={config.model} has no tokenizer that transformers loads: {error}; give the directory or hub"
            " name of the model, and its name on the server as policy.tinker.base_model"
        ) from error
