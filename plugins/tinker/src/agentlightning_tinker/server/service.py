"""What the Tinker API does, over models of this machine: sessions, training runs, samplers and saved weights.

A training run is an adapter over one of the models (`host`). Saved weights are directories in peft's
format below `folder`, and stay when the server stops; sessions, training runs and samplers are forgotten then, and when
nothing was heard of a session for `session_seconds`. Errors are ConfigError where the client asked for what cannot be.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final
from urllib.parse import quote, unquote

import numpy as np
from starlette.responses import Response

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning_tinker.losses import make_loss
from agentlightning_tinker.server import wire
from agentlightning_tinker.server.host import AdapterHost
from agentlightning_tinker.server.sessions import Found, Sampler, Session, Work, require

logger = logging.getLogger(__name__)

SCHEME: Final = "tinker://"
KINDS = WEIGHTS, SAMPLER, EXTERNAL, SNAPSHOTS = "weights", "sampler_weights", "external_weights", "snapshots"
"""Of saved weights; snapshots have no name, and end with their session."""
SESSION_SECONDS: Final = 900.0
POLL_SECONDS: Final = 20.0
"""How long a request for a result waits for it."""


class TinkerService:
    """Serves `hosts`. The methods that take a request of `wire` answer it, some with the id of a request whose result
    is fetched later."""

    def __init__(self, hosts: Sequence[AdapterHost], folder: Path, *, session_seconds: float = SESSION_SECONDS) -> None:
        self.hosts = {host.config.name: host for host in hosts}
        self.sessions: dict[str, Session] = {}
        self._folder, self._session_seconds = folder.absolute(), session_seconds

    async def close(self) -> None:
        """Stop all requests, end all sessions, and close the models."""
        for session in list(self.sessions):
            await self.end_session(session)
        for host in self.hosts.values():
            await host.close()

    # -- sessions --------------------------------------------------------------------------------------------------

    async def create_session(self, request: wire.CreateSession) -> Found:
        name = token_hex(8)
        self.sessions[name] = Session(name)
        logger.info("session %s of a client of version %s", name, request.sdk_version or "unknown")
        return {"type": "create_session", "session_id": name}

    def session(self, name: str) -> Session:
        """The session of a name: its own, or that of a training run, a sampler or a request. Raises NotFoundError for
        one that has ended."""
        found = require(self.sessions.get(name.partition(":")[0]), f"session {name!r}")
        found.heard = time.monotonic()
        return found

    async def heartbeat(self, request: wire.SessionId) -> Found:
        self.session(request.session_id)
        return {"type": "session_heartbeat"}

    async def end_session(self, name: str) -> None:
        """Forget its training runs and samplers; weights that were saved under a name stay."""
        if (session := self.sessions.pop(name, None)) is None:
            return
        await session.close()
        for host in self.hosts.values():  # behind what is still made of the session in there
            await host.run(host.remove, f"{name}:")
        await asyncio.to_thread(self._remove_snapshots, name)

    def _remove_snapshots(self, session: str) -> None:
        for directory in self._folder.glob(f"{session}%3A*/{SNAPSHOTS}"):
            shutil.rmtree(directory, ignore_errors=True)

    async def end_silent_sessions(self) -> None:
        """End the sessions that were not heard of for too long. Never returns."""
        while True:
            await asyncio.sleep(self._session_seconds / 10)
            limit = time.monotonic() - self._session_seconds
            for name in [name for name, session in self.sessions.items() if session.heard < limit]:
                logger.warning("session %s ends: nothing was heard of it for %g s", name, self._session_seconds)
                await self.end_session(name)

    def enqueue(self, place: Any, work: Work) -> Found:
        """Do the work of a request with a `model_id` and a `seq_id` in its turn."""
        return {"request_id": self.session(place.model_id).enqueue(place.model_id, place.seq_id, work)}

    async def fetch(self, request: wire.RequestId) -> Found:
        name = request.request_id
        result = await self.session(name).fetch(name, POLL_SECONDS)
        return result or {"type": "try_again", "request_id": name, "queue_state": "active"}

    async def cancel(self, request: wire.RequestId) -> Found:
        with suppress(NotFoundError):  # its session has ended, and it with that
            self.session(request.request_id).cancel(request.request_id)
        return {}

    # -- training runs ---------------------------------------------------------------------------------------------

    def capabilities(self) -> Found:
        offered = {"trainable": True, "sampleable": True}
        lengths = {name: host.context_length for name, host in self.hosts.items()}
        return {"supported_models": [{"model_name": n, "max_context_length": c, **offered} for n, c in lengths.items()]}

    async def begin(self, request: wire.CreateModel | wire.LoadWeights) -> Found:
        """Begin a training run of a session: a new one, or one of the shape and the weights of what was saved."""
        if request.session_id is None or request.model_seq_id is None:
            raise ConfigError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        session = self.session(request.session_id)
        name = f"{session.name}:train:{request.model_seq_id}"
        return {"request_id": session.open_queue(name, lambda: self._make(session, name, request))}

    async def _make(self, session: Session, name: str, request: wire.CreateModel | wire.LoadWeights) -> Found:
        if isinstance(request, wire.LoadWeights):
            saved = await self._saved(request.path)
            base, shape = request.base_model or saved.base, saved.shape
        elif request.lora_config is None:
            raise ConfigError("lora_config is missing: this server trains adapters (LoRA), not all weights")
        else:
            base, shape = request.base_model, request.lora_config
        host = self._host(base)
        await host.run(host.create, name, shape)
        session.models[name] = host
        if isinstance(request, wire.LoadWeights):
            return await self._load(name, request)
        return {"type": "create_model", "model_id": name}

    def model(self, name: str) -> AdapterHost:
        """What a training run is over. Raises NotFoundError."""
        return require(self.session(name).models.get(name), f"model {name!r}")

    async def forward_backward(self, request: Any) -> Found:
        """A request as `wire.read_request` gives it."""
        host = self.model(request.model_id)
        loss = make_loss(request.loss_fn, wire.loss_config(request))
        data = await asyncio.to_thread(wire.read_data, request, host.vocab_size, host.context_length)
        backward = not request.forward_only
        total, logprobs = await host.run(host.gradient, request.model_id, data, loss, backward=backward)
        return await asyncio.to_thread(wire.loss_output, logprobs, total)

    async def optim_step(self, request: wire.OptimStep) -> Found:
        host = self.model(request.model_id)
        return {"type": "optim_step", "metrics": await host.run(host.optim_step, request.model_id, request.adam_params)}

    async def info(self, request: wire.ModelId) -> Found:
        host = self.model(request.model_id)
        return {
            "type": "get_info",
            "model_id": request.model_id,
            "model_name": host.config.name,
            "model_data": {"model_name": host.config.name, "tokenizer_id": host.config.model},
            "is_lora": True,
            "lora_rank": host.trained[request.model_id].shape.rank,
        }

    # -- saved weights ---------------------------------------------------------------------------------------------

    async def save_weights(self, request: wire.SaveWeights) -> Found:
        path = await self._save(request.model_id, WEIGHTS, request.path, overwrite=request.overwrite)
        return {"type": "save_weights", "path": path}

    async def save_for_sampler(self, request: wire.SaveForSampler) -> Found:
        if request.sampling_session_seq_id is None:
            path = await self._save(request.model_id, SAMPLER, request.path)
            return {"type": "save_weights_for_sampler", "path": path}
        copy = await self._saved(await self._save(request.model_id, SNAPSHOTS))
        sampler = Sampler(self.model(request.model_id), copy)
        name = self._add_sampler(request.model_id, request.sampling_session_seq_id, sampler)
        return {"type": "save_weights_for_sampler", "sampling_session_id": name}

    async def save_external(self, request: wire.SaveExternal) -> Found:
        """For other programs, which download the files."""
        path = await self._save(request.model_id, EXTERNAL, request.path)
        size = sum([file.stat().st_size for file in (await self.external_files(path)).values()])
        return {"type": "save_weights_external", "path": path, "size_bytes": size}

    async def external_files(self, path: str) -> dict[str, Path]:
        """The files of weights that were saved for other programs, by their name. Raises ConfigError."""
        directory = (await self._saved(path)).directory
        if directory.parent.name != EXTERNAL:
            raise ConfigError(f"{path} is not for other programs; save with save_weights_external, and download that")
        found = await asyncio.to_thread(lambda: sorted(each for each in directory.rglob("*") if each.is_file()))
        return {name: each for each in found if (name := each.relative_to(directory).as_posix()) != wire.ABOUT}

    async def load_weights(self, request: wire.LoadWeights) -> Found:
        """Into a training run, else into a new one."""
        if request.model_id is None or request.seq_id is None:
            return await self.begin(request)
        return await self._load(request.model_id, request)

    async def _load(self, name: str, request: wire.LoadWeights) -> Found:
        saved, host = await self._saved(request.path), self.model(name)
        await host.run(host.load_trained, name, saved.directory, with_optimizer=request.optimizer)
        return {"type": "load_weights", "path": request.path, "model_id": name}

    async def weights_info(self, request: wire.WeightsPath) -> Found:
        saved = await self._saved(request.tinker_path)
        shape = saved.shape.model_dump(include={"train_unembed", "train_mlp", "train_attn"})
        return {"base_model": saved.base, "is_lora": True, "lora_rank": saved.shape.rank, **shape}

    async def _save(self, model_id: str, kind: str, given: str | None = None, *, overwrite: bool = False) -> str:
        host, name = self.model(model_id), given or f"save-{token_hex(4)}"
        path = f"{SCHEME}{quote(model_id, safe=':')}/{kind}/{quote(name, safe='')}"
        directory = self._directory(path)
        if not overwrite and await asyncio.to_thread(directory.exists):
            raise ConfigError(f"{path} exists; choose another name, or save with overwrite=True")
        await host.run(host.save_trained, model_id, directory, with_optimizer=kind == WEIGHTS)
        return path

    def _directory(self, path: str) -> Path:
        """Where the weights of a path are. Raises ConfigError for what is no path."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise ConfigError(f"{path!r} is no path of saved weights; one is {SCHEME}MODEL/{WEIGHTS}/NAME")
        model, kind, name = (quote(unquote(part), safe="").replace(".", "%2E") for part in parts)
        return self._folder / model / kind / name

    async def _saved(self, path: str) -> wire.Saved:
        """Raises ConfigError where there are none."""
        directory = self._directory(path)
        try:
            about = await asyncio.to_thread((directory / wire.ABOUT).read_bytes)
            return wire.Saved.model_validate_json(about).model_copy(update={"directory": directory})
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} holds no saved weights here: {error}") from error

    # -- sampling --------------------------------------------------------------------------------------------------

    async def create_sampler(self, request: wire.CreateSampler) -> Found:
        base, copy = request.base_model, None
        if request.model_path is not None:
            copy = await self._saved(request.model_path)
            base = copy.base
        if base is None:
            raise ConfigError("name what to sample from: base_model, or model_path of saved weights")
        sampler = Sampler(self._host(base), copy, request.model_path)
        name = self._add_sampler(request.session_id, request.sampling_session_seq_id, sampler)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _add_sampler(self, owner: str, number: int, sampler: Sampler) -> str:
        session = self.session(owner)
        name = f"{session.name}:sample:{number}"
        session.samplers[name] = sampler
        return name

    def sampler(self, name: str) -> Sampler:
        """Raises NotFoundError."""
        return require(self.session(name).samplers.get(name), f"sampler {name!r}")

    def sampler_info(self, name: str) -> Found:
        found = self.sampler(name)
        return {"sampler_id": name, "base_model": found.host.config.name, "model_path": found.path}

    async def sample(self, request: wire.SampleRequest) -> Found:
        """The id of the request, and one for each sequence."""
        if (chosen := request.sampling_session_id) is None:
            raise ConfigError("asample needs a sampling_session_id; begin with create_sampling_session")
        if request.prompt_logprobs_last_n is not None and not request.prompt_logprobs:
            raise ConfigError("prompt_logprobs_last_n needs prompt_logprobs")
        if not request.prompt.tokens:
            raise ConfigError("the prompt has no tokens; give at least one")
        session, sampler = self.session(chosen), self.sampler(chosen)
        params = [_params(request, number) for number in range(request.num_samples)]
        sampler.host.validate(request.prompt.tokens, params[0])
        # Three quarters of a batch: answers of another session do not wait for all that one has asked for.
        batch = sampler.host.config.max_batch_size
        slots = session.slots.setdefault(sampler.host, asyncio.Semaphore(batch - batch // 4))
        name = session.start(lambda: _sample(sampler, slots, request, params))
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{number}" for number in range(len(params))]}

    def _host(self, name: str) -> AdapterHost:
        if name not in self.hosts:
            raise ConfigError(f"the model {name!r} is not served here; there are {', '.join(self.hosts)}")
        return self.hosts[name]


async def _sample(
    sampler: Sampler, slots: asyncio.Semaphore, request: wire.SampleRequest, params: Sequence[SamplingParams]
) -> Response:
    host, tokens, prompt = sampler.host, request.prompt.tokens, None

    async def sample(each: SamplingParams) -> Sample:
        async with slots:
            return await host.sample_copy(sampler.copy, tokens, each)

    if request.prompt_logprobs:
        async with slots:
            scores = await host.score_copy(sampler.copy, tokens) if len(tokens) > 1 else []
        prompt = np.concatenate([[np.nan], scores])
        prompt[: -(request.prompt_logprobs_last_n or len(prompt))] = np.nan
    return wire.sample_output(await asyncio.gather(*map(sample, params)), prompt)


def _params(request: wire.SampleRequest, number: int) -> SamplingParams:
    """A list of `stop` takes the place of the model's own end tokens; None leaves these."""
    given = request.sampling_params
    stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=0 if given.top_k == -1 else given.top_k,
        max_tokens=given.max_tokens,
        stop=tuple(each for each in stop if isinstance(each, str)),
        stop_token_ids=tuple(each for each in stop if isinstance(each, int)),
        ignore_eos=given.stop is not None,
        seed=None if given.seed is None else given.seed + number,
        top_logprobs=request.topk_sample_logprobs,
    )
