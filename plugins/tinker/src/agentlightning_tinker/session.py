"""A training run on a server of the Tinker API: the calls of the `tinker` package, with its errors as ours.

Nothing else here imports the package.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, cast

import httpx
import numpy as np
import tinker
from tinker import types

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.config import OptimizerConfig, TinkerConfig
from agentlightning.trajectory import FloatArray

BASE_URL: Final = "TINKER_BASE_URL"
KEY_PREFIX: Final = "tml-"
HEALTH: Final = "/api/v1/healthz"
POLL_SECONDS: Final = 5.0
"""How often the server is asked for a sign of life while a request waits."""
CLOSE_SECONDS: Final = 5.0
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
    """One training run. Make it with `TinkerSession.open`."""

    def __init__(self, config: TinkerConfig, service: Any, base_model: str) -> None:
        self.config, self.base_model = config, base_model
        self._service = service
        self._training: Any = None
        self._base: Any = None
        self._url = server_of(config)
        self._asked = self._alive = self._silent = time.monotonic()
        """When the server was asked for a sign of life, when it last gave one, and when it last gave none."""

    @classmethod
    async def open(cls, config: TinkerConfig, model: str, rank: int, seed: int) -> TinkerSession:
        """Begin a training run. Raises ConfigError for a key, and PolicyError for a server that is
        not there, or has no such model."""
        key = os.environ.get(config.key_env, "")
        if not key.startswith(KEY_PREFIX):
            raise ConfigError(
                f"the environment variable {config.key_env} (policy.tinker.key_env) "
                f"{f'does not begin with {KEY_PREFIX}' if key else 'is not set'}; the key of a server of one's own is"
                f" {KEY_PREFIX} and its token"
            )
        os.environ.setdefault("TINKER_TELEMETRY", "1" if config.telemetry else "0")
        url, base = server_of(config), config.base_model or model
        if url is not None:
            await asyncio.to_thread(_require_server, url)
        with _errors(config, "open a session"):
            service = await asyncio.to_thread(partial(tinker.ServiceClient, base_url=url, api_key=key))
        session = cls(config, service, base)
        layers = {"train_mlp": config.mlp, "train_attn": config.attention, "train_unembed": config.head}
        making = partial(service.create_lora_training_client, base, rank=rank, seed=seed, **layers)
        try:
            session._training = await session._result(making, f"make an adapter over {base!r}")
        except BaseException:
            await session.close("errored")
            raise
        return session

    # -- training --------------------------------------------------------------------------------------------------

    async def forward_backward(
        self,
        rows: Sequence[Sequence[int]],
        inputs: Sequence[Mapping[str, FloatArray]],
        loss: str,
        settings: Mapping[str, float],
        *,
        backward: bool = True,
    ) -> list[FloatArray]:
        """Add the gradient of a loss, or without `backward` compute it alone. `inputs` are what it needs of the tokens
        of each row but the first [T - 1]; returns log p of these."""
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(list(tokens[:-1])),
                loss_fn_inputs=cast(Any, {"target_tokens": np.asarray(tokens[1:], np.int64), **own}),
            )
            for tokens, own in zip(rows, inputs, strict=True)
        ]
        call = self._training.forward_backward if backward else self._training.forward
        output = await self._result(partial(call, data, loss, dict(settings) or None), f"compute the loss {loss!r}")
        return [np.asarray(each["logprobs"].to_numpy(), np.float32) for each in output.loss_fn_outputs]

    async def optim_step(self, lr: float, config: OptimizerConfig, eps: float) -> Mapping[str, float]:
        """A step of AdamW by the gradient so far; returns the server's metrics."""
        params = types.AdamParams(
            learning_rate=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.clip_norm or 0.0,
        )
        return (await self._result(partial(self._training.optim_step, params), "take an optimiser step")).metrics or {}

    async def save(self, name: str) -> str:
        """Save weights and optimiser on the server; returns their path there."""
        return (await self._result(partial(self._training.save_state, name), "save the weights")).path

    async def load(self, path: str) -> None:
        """Continue from what `save` saved, in a new training run on the server."""
        loading = partial(self._service.create_training_client_from_state_with_optimizer, path)
        self._training = await self._result(loading, f"load {path}")

    async def sampler(self) -> Any:
        """What samples from the weights as they are now."""
        return await self._result(self._training.save_weights_and_get_sampling_client, "publish the weights")

    async def base_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float | None]]:
        """log p of each token of each row under the model below the adapter, None for the first."""
        if self._base is None:
            opening = partial(self._service.create_sampling_client, base_model=self.base_model)
            self._base = await self._result(opening, "open its base")
        inputs = [types.ModelInput.from_ints(list(row)) for row in rows]
        return [await self._result(partial(self._base.compute_logprobs, each), "score tokens") for each in inputs]

    async def close(self, status: str = "success") -> None:
        """End the session on the server; what was saved stays. Never fails: the server may be gone, which the package
        would ask for hours, with heartbeats meanwhile."""
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
        tokens = types.ModelInput.from_ints(list(prompt))
        with _errors(self.config, "sample"):
            call = sampler.sample(tokens, 1, settings, topk_sample_logprobs=params.top_logprobs)
            return (await self._wait(call.future(), "sample")).sequences[0]

    # -- requests --------------------------------------------------------------------------------------------------

    async def _result(self, call: Callable[[], Any], what: str) -> Any:
        with _errors(self.config, what):
            pending = await asyncio.to_thread(call)  # some ask the server before they return
            return await self._wait(pending.future(), what)

    async def _wait(self, future: Future[Any], what: str) -> Any:
        """What a request gives. Raises what the request raises, and PolicyError for one that takes too long, or whose
        server is gone for too long: that is asked once in POLL_SECONDS, however many requests wait."""
        began, waiting = time.monotonic(), asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({waiting}, timeout=POLL_SECONDS))[0]:
                now = time.monotonic()
                if now - began > self.config.timeout_seconds:
                    raise PolicyError(
                        f"{_name(self.config)} did not {what} in {self.config.timeout_seconds:g} s; resume the run, or"
                        " raise policy.tinker.timeout_seconds"
                    )
                if self._url is not None:
                    await self._check_server(self._url, began, now, what)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _check_server(self, url: str, began: float, now: float, what: str) -> None:
        if now - self._asked >= POLL_SECONDS:
            self._asked = now
            if await asyncio.to_thread(_is_alive, url):
                self._alive = now
            else:
                self._silent = now
        gone = self._silent - max(self._alive, began)
        if gone > self.config.unreachable_seconds:
            raise PolicyError(
                f"{url} was unreachable for {gone:.0f} s while it was to {what}; start it again, and resume the run"
            )


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
