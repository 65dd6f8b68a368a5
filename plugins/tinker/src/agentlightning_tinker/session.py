"""A training run on a server of the Tinker API: the calls of the `tinker` package, with its errors as ours.

Nothing else here imports the package.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import httpx
import numpy as np
import tinker
from tinker import types

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.config import OptimizerConfig, TinkerConfig
from agentlightning.policy.update.packing import Row
from agentlightning.trajectory import FloatArray

BASE_URL: Final = "TINKER_BASE_URL"
KEY_PREFIX: Final = "tml-"
HEALTH: Final = "/api/v1/healthz"
POLL_SECONDS: Final = 5.0
"""How often the server is asked for a sign of life while a request waits."""
CLOSE_SECONDS: Final = 5.0
EPS: Final = 1e-8
"""Of AdamW, as torch has it."""
REMEDIES: Final = (
    (
        tinker.NotFoundError,
        "it has forgotten this session (resume the run), or is of another version than this package",
    ),
    (tinker.APIConnectionError, "it cannot be reached: resume the run when it is back"),
    (Exception, "resume the run once that is mended"),
)
"""What to do about an error of the package."""


class TinkerSession:
    """One training run. Make it with `TinkerSession.open`, and `begin` it."""

    def __init__(self, config: TinkerConfig, service: Any, base_model: str) -> None:
        self.config, self.base_model = config, base_model
        self._service = service
        self._training: Any = None
        self._base: Any = None
        self._alive = self._silent = time.monotonic()
        """When the server last gave a sign of life, and when it last gave none."""
        self._watch = asyncio.create_task(self._watch_server(server_of(config)))

    @classmethod
    async def open(cls, config: TinkerConfig, model: str) -> TinkerSession:
        """Raises ConfigError for a key, and PolicyError for a server that is not there."""
        key = os.environ.get(config.key_env, "")
        if not key.startswith(KEY_PREFIX):
            raise ConfigError(
                f"the environment variable {config.key_env} (policy.tinker.key_env) "
                f"{f'does not begin with {KEY_PREFIX}' if key else 'is not set'}; the key of a server of one's own is"
                f" {KEY_PREFIX} and its token"
            )
        os.environ.setdefault("TINKER_TELEMETRY", "1" if config.telemetry else "0")
        if (url := server_of(config)) is not None:
            await asyncio.to_thread(_require_server, url)
        with _errors(config, "open a session"):
            service = await asyncio.to_thread(tinker.ServiceClient, base_url=url, api_key=key)
        return cls(config, service, config.base_model or model)

    # -- training --------------------------------------------------------------------------------------------------

    async def begin(self, rank: int, seed: int) -> None:
        """Make the adapter that is trained. Raises PolicyError for a model that the server does not have."""
        layers = {"train_mlp": self.config.mlp, "train_attn": self.config.attention, "train_unembed": self.config.head}
        what, create = f"make an adapter over {self.base_model!r}", self._service.create_lora_training_client
        self._training = await self._result(what, create, self.base_model, rank=rank, seed=seed, **layers)

    async def forward_backward(
        self,
        rows: Sequence[Row],
        columns: Mapping[str, FloatArray],
        loss: str,
        settings: Mapping[str, float],
        *,
        backward: bool = True,
    ) -> FloatArray:
        """Add the gradient of a loss, or without `backward` compute it alone. `columns` are what it needs of the
        targets of all rows, one behind the other [N]; returns log p of these."""
        data, start = list[types.Datum](), 0
        for row in rows:
            inputs: dict[str, Any] = {"target_tokens": np.asarray(row.token_ids[1:], np.int64)}
            end = start + len(row.targets)
            for name, values_N in columns.items():
                inputs[name] = np.zeros(row.length, np.float32)
                inputs[name][row.targets - 1] = values_N[start:end]
            data.append(types.Datum(model_input=_tokens(row.token_ids[:-1]), loss_fn_inputs=inputs))
            start = end
        call = self._training.forward_backward if backward else self._training.forward
        output = await self._result(f"compute the loss {loss!r}", call, data, loss, dict(settings) or None)
        found = (np.asarray(each["logprobs"].to_numpy(), np.float32) for each in output.loss_fn_outputs)
        return np.concatenate([own[row.targets - 1] for own, row in zip(found, rows, strict=True)])

    async def optim_step(self, lr: float, config: OptimizerConfig) -> Mapping[str, float]:
        """A step of AdamW by the gradient so far; returns the server's metrics."""
        params = types.AdamParams(
            learning_rate=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=EPS,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.clip_norm or 0.0,
        )
        return (await self._result("take an optimiser step", self._training.optim_step, params)).metrics or {}

    async def save(self, name: str) -> str:
        """Save weights and optimiser on the server; returns their path there."""
        return (await self._result("save the weights", self._training.save_state, name)).path

    async def load(self, path: str) -> None:
        """Continue from what `save` saved, in a new training run on the server."""
        load = self._service.create_training_client_from_state_with_optimizer
        self._training = await self._result(f"load {path}", load, path)

    async def sampler(self) -> Any:
        """What samples from the weights as they are now."""
        return await self._result("publish the weights", self._training.save_weights_and_get_sampling_client)

    async def base_logprobs(self, rows: Sequence[Row]) -> FloatArray:
        """log p of the targets of all rows under the model below the adapter, one behind the other [N]."""
        if self._base is None:
            create = self._service.create_sampling_client
            self._base = await self._result("open its base", create, base_model=self.base_model)
        found = list[FloatArray]()
        for row in rows:
            own = await self._result("score tokens", self._base.compute_logprobs, _tokens(row.token_ids))
            found.append(np.asarray(own, np.float32)[row.targets])
        return np.concatenate(found)

    async def close(self, status: str = "success") -> None:
        """End the session on the server; what was saved stays. Never fails: the server may be gone, which the package
        would ask for hours, with heartbeats meanwhile."""
        self._watch.cancel()
        with suppress(Exception):  # the run's own error, or its result, is what counts
            async with asyncio.timeout(CLOSE_SECONDS):
                ending = await asyncio.to_thread(self._service.close, status)  # it waits for a session that is made
                await asyncio.wrap_future(ending.future())

    # -- sampling --------------------------------------------------------------------------------------------------

    async def sample(self, sampler: Any, prompt: Sequence[int], params: SamplingParams, stop: Any) -> Any:
        """One sequence; `stop` as the package has it."""
        settings = types.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=stop,
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )
        top, tokens = params.top_logprobs, _tokens(prompt)
        found = await self._result("sample", sampler.sample, tokens, 1, settings, topk_sample_logprobs=top)
        return found.sequences[0]

    # -- requests --------------------------------------------------------------------------------------------------

    async def _result(self, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a call of the package gives. Raises PolicyError for one that fails, that takes too long, or whose server
        is gone for too long."""
        where = _name(self.config)
        with _errors(self.config, what):
            began = time.monotonic()
            pending = await asyncio.to_thread(call, *args, **options)  # some ask the server before they return
            waiting = asyncio.wrap_future(pending.future())
            try:
                while not (await asyncio.wait({waiting}, timeout=POLL_SECONDS))[0]:
                    if time.monotonic() - began > self.config.timeout_seconds:
                        raise PolicyError(
                            f"{where} did not {what} in {self.config.timeout_seconds:g} s; resume the run, or raise"
                            " policy.tinker.timeout_seconds"
                        )
                    gone = self._silent - max(self._alive, began)
                    if gone > self.config.unreachable_seconds:
                        raise PolicyError(
                            f"{where} was unreachable for {gone:.0f} s while it was to {what}; start it again, and"
                            " resume the run"
                        )
                return waiting.result()
            finally:
                waiting.cancel()

    async def _watch_server(self, url: str | None) -> None:
        """Ask the server for a sign of life, however many requests wait for it; the hosted service is not asked."""
        while url is not None:
            await asyncio.sleep(POLL_SECONDS)
            if await asyncio.to_thread(_is_alive, url):
                self._alive = time.monotonic()
            else:
                self._silent = time.monotonic()


def _tokens(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def server_of(config: TinkerConfig) -> str | None:
    """The server's address; None: the hosted service."""
    url = config.url or os.environ.get(BASE_URL)
    return url.rstrip("/") if url else None


def _is_alive(url: str) -> bool:
    try:
        return httpx.get(url + HEALTH, timeout=POLL_SECONDS).status_code < 500
    except httpx.HTTPError:
        return False


@contextmanager
def _errors(config: TinkerConfig, what: str) -> Generator[None]:
    """Errors of the package as PolicyError; of the key as ConfigError."""
    where = _name(config)
    try:
        yield
    except (ConfigError, PolicyError):
        raise
    except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
        raise ConfigError(f"{where} refuses the key in {config.key_env}: {error}") from error
    except (tinker.TinkerError, ValueError, RuntimeError, TimeoutError) as error:
        remedy = next(text for kind, text in REMEDIES if isinstance(error, kind))
        raise PolicyError(f"{where} could not {what}: {error} (tinker {tinker.__version__}); {remedy}") from error


def _name(config: TinkerConfig) -> str:
    return server_of(config) or "the Tinker service"


def _require_server(url: str) -> None:
    """The package would try for minutes."""
    try:
        status = httpx.get(url + HEALTH, timeout=30).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PolicyError(
            f"no server of the Tinker API answers at {url} (policy.tinker.url): {error}; start one with agl serve"
            " --tinker NAME=DIR, or mend the address"
        ) from error
    if status == 404:
        raise PolicyError(
            f"the server at {url} does not speak the Tinker API: GET {HEALTH} gave 404; start it with agl serve"
            " --tinker NAME=DIR, or mend policy.tinker.url"
        )
