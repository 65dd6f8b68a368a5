"""Client of one vLLM server: sampling by token ids, and the endpoints that replace its weights.

Answers come from `/inference/v1/generate`, which names tokens by id and reports which weights sampled them, if the
server was started with `--enable-scale-out`; otherwise from `/v1/completions` with token ids. Log-probabilities are
those of the distribution a token was sampled from only with `--logprobs-mode processed_logprobs`: `verify` finds out by
sampling. Replacing weights needs `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from agentlightning.engine.base import DISTRIBUTION_PARAMS, TERMINATION_PARAMS, SamplingParams, TopLogprobs
from agentlightning.engine.servers.clients import guard_process
from agentlightning.engine.servers.clients.http import (
    PROBE_PROMPT,
    Completion,
    HttpModelServer,
    JsonClient,
    ModelServerError,
    OnChunk,
    SampleRequest,
    TokenChunk,
)
from agentlightning.errors import ConfigError, PolicyError, ServerError
from agentlightning.transport import Transport
from agentlightning.weight_sync.transfer import LendWeights, TransferError, WeightSender

# -- vllm wire -------------------------------------------------------------------------------------------------------

# Wire formats of vLLM's two sampling endpoints: request bodies out, token chunks in.

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
IMPOSSIBLE = -9999.0
"""vLLM's log-probability of a token that cannot be sampled."""
_CONSTRAINT_FIELDS: Mapping[str, str] = {"json_schema": "json", "grammar": "grammar"}
"""Kind of constraint -> vLLM's name for it."""
_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "seed"),
)
"""Fields of `SamplingParams` that vLLM has under the same name."""


def _body(path: str, request: SampleRequest, stream: bool) -> dict[str, Any]:
    prompt, sampling = list(request.prompt), _sampling_params(request)
    body: dict[str, Any] = {"model": request.model, "stream": stream}
    if path == GENERATE:
        return {**body, "token_ids": prompt, "sampling_params": sampling}
    # It names tokens by their text unless asked for their ids.
    return {**body, "prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True, **sampling}


def _read_chunk(path: str, choice: Mapping[str, Any], limit: int) -> TokenChunk:
    """The tokens of a response, with the `limit` most likely at each position."""
    logprobs: Mapping[str, Any] = choice.get("logprobs") or {}
    if path == GENERATE:
        content: Sequence[Mapping[str, Any]] = logprobs.get("content") or ()
        named, values = ([entry[name] for entry in content] for name in ("token_id", "logprob"))
        tops = [[(top["token_id"], top["logprob"]) for top in entry["top_logprobs"]] for entry in content if limit]
    else:
        named = [_token_id(name) for name in logprobs.get("tokens") or ()]
        values = logprobs.get("token_logprobs") or ()
        entries: Sequence[Mapping[str, float]] = (limit and logprobs.get("top_logprobs")) or ()
        tops = [[(_token_id(name), value) for name, value in entry.items()] for entry in entries]
    token_ids = choice.get("token_ids") or []
    if token_ids != named:
        raise ValueError(f"tokens {token_ids} with the log-probabilities of {named}")
    return TokenChunk(tuple(named), tuple(map(float, values)), tuple(most_likely(entry, limit) for entry in tops))


def _weights(choice: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """See `Completion.weights`; only GENERATE reports them."""
    return tuple((str(span["version"]), span["end"] - span["start"]) for span in choice.get("weight_versions") or ())


def _sampling_params(request: SampleRequest) -> dict[str, Any]:
    """The fields that both endpoints take. All are sent, since vLLM takes missing ones from the model's defaults."""
    params, constraint = request.params, request.params.constraint
    return {
        **{name: getattr(params, name) for name in _SAME_NAMES},
        "max_tokens": request.max_tokens,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "stop": list(params.stop),
        "stop_token_ids": sorted(request.end_tokens),
        "structured_outputs": {_CONSTRAINT_FIELDS[constraint[0]]: constraint[1]} if constraint else None,
        # Stop strings may be special tokens, such as the end of a tool call.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        # One more than requested, because the list begins with the sampled token.
        "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,
    }


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def most_likely(entries: Sequence[tuple[int, float]], limit: int) -> TopLogprobs:
    """The `limit` most likely of `entries`, without tokens that cannot be sampled."""
    possible = {token: value for token, value in entries if value > IMPOSSIBLE}
    return tuple(sorted(possible.items(), key=lambda pair: (-pair[1], pair[0]))[:limit])


MIN_TEMPERATURE = 0.01
"""vLLM samples at no lower temperature except 0."""
LOAD_SECONDS = 600.0
"""The longest a server may take to read its weights."""
NOT_ENABLED = "LoRA is not enabled"
"""What vLLM answers to an adapter without --enable-lora."""
RANK_TOO_LARGE = "max_lora_rank"
MOST_TIES = 32
"""Tokens that may be equally likely, as logits of half precision can be."""


class VllmServer(HttpModelServer):
    """One vLLM server, and the first model it lists. It also accepts weights without the disk."""

    supported_params: frozenset[str] = frozenset([*DISTRIBUTION_PARAMS, *TERMINATION_PARAMS])
    kv_cache_metrics = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    """The metric's name, and the one it had before."""

    _has_generate: bool | None = None
    """Whether the server has GENERATE; None: not known yet."""
    _partial_update = False
    """Whether a weight update began and did not complete."""

    async def verify(self, *, weights_change: bool) -> None:
        if weights_change:
            await self._resume_if_paused()
        model = (await self.model_info()).model
        request = SampleRequest(model, PROBE_PROMPT, SamplingParams(top_k=1), 4, frozenset())
        logprobs: list[float] = []
        await self.sample(request, lambda chunk: logprobs.extend(chunk.logprobs), stream=False)
        if not all(map(_is_of_the_likeliest, logprobs)):
            raise ConfigError(
                f"{self.url} answers log-probabilities that are not those of the distribution it samples from; start "
                "it with --logprobs-mode processed_logprobs"
            )

    # -- sampling --------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest, on_chunk: OnChunk, *, stream: bool) -> Completion:
        validate(request.params)
        if self._has_generate is None:
            self._has_generate = await self._detect_generate()
        path = GENERATE if self._has_generate else COMPLETIONS

        def read(response: Any) -> Completion | None:
            """Pass on the tokens of a response or event; returns its end as far as it is known."""
            if not isinstance(response, dict) or not response.get("choices"):
                if stream and isinstance(response, dict) and "error" not in response:
                    return None
                content = response.get("error", response) if isinstance(response, dict) else response
                raise self.protocol_error(path, f"no answer but {content!r:.300}")
            choice = response["choices"][0]
            try:
                chunk, weights = _read_chunk(path, choice, request.params.top_logprobs), _weights(choice)
            except (KeyError, TypeError, ValueError) as error:
                raise self.protocol_error(path, f"an answer that cannot be read ({error!r})") from error
            if chunk.token_ids:
                on_chunk(chunk)
            reason = choice.get("finish_reason")
            if reason not in (None, "stop", "length"):
                raise self.protocol_error(path, f"the answer was ended by the server ({reason})")
            return Completion("length" if reason == "length" else "stop", weights)

        return await self._complete(path, _body(path, request, stream), request, read)

    async def _detect_generate(self) -> bool:
        try:
            await self.post(GENERATE, {"token_ids": []}, seconds=10.0)
        except ModelServerError as error:
            if error.status in (400, 422):
                return True  # It rejected the prompt, not the path.
            if error.status in (404, 405):
                return False
            raise
        return True

    # -- weights ---------------------------------------------------------------------------------------------------

    async def weight_label(self) -> str | None:
        response = await self.get("/weight_info", optional=True)
        return response.get("weight_version") if isinstance(response, dict) else None

    @asynccontextmanager
    async def _update(self, on_loaded: Callable[[], None]) -> AsyncGenerator[None]:
        """A context in which the weights are replaced. Its order ensures that half-loaded weights never sample, and
        that no key or value outlives its weights."""
        await self.post("/pause?mode=keep", seconds=60.0)
        await self.discard_partial_update()
        self._partial_update = True
        yield
        self._partial_update = False
        response = await self.post("/reset_prefix_cache?reset_running_requests=true", seconds=60.0)
        if isinstance(response, dict) and response.get("success") is False:
            raise self.protocol_error("/reset_prefix_cache", "it keeps what the old weights computed")
        on_loaded()
        await self.post("/resume", seconds=60.0)

    async def load_weights(self, directory: Path, label: str, on_loaded: Callable[[], None]) -> None:
        async with self._update(on_loaded):
            await self._reload({"weights_path": str(directory)}, LOAD_SECONDS)
            # Older servers have no labels.
            await self.post("/update_weight_version", {"new_version": label}, seconds=60.0, optional=True)

    async def connect(self, sender: WeightSender) -> None:
        """Connect the server's workers with `sender`. Raises ConfigError if it was not started for that, and
        TransferError; an error of the server takes precedence over NCCL's."""
        with contextlib.suppress(ModelServerError):  # Whatever is left of another run, or of a sender that failed.
            await self.post("/shutdown_weight_transfer_engine", seconds=60.0)
        body = {"init_info": sender.init_info(int((await self.get("/get_world_size"))["world_size"]))}
        joining = asyncio.create_task(self.post("/init_weight_transfer_engine", body, seconds=LOAD_SECONDS))
        joining.add_done_callback(lambda done: sender.abort() if done.cancelled() or done.exception() else None)
        try:
            try:
                await asyncio.to_thread(sender.connect)
            except TransferError as error:
                if joining.done():
                    await joining
                raise TransferError(f"{self.url}: {error}") from error
            await joining
        except ModelServerError as error:
            if error.status not in (404, 500):
                raise
            raise ConfigError(
                f"{self.url} does not take weights in this way ({error}); start it with --weight-transfer-config, "
                'or use transfer = "disk"'
            ) from error
        finally:
            joining.cancel()

    async def receive_weights(
        self, sender: WeightSender, lend: LendWeights, label: str, on_loaded: Callable[[], None]
    ) -> None:
        """As `load_weights`, with weights lent by `lend` and sent by `sender`; raises TransferError, too. After a
        failure the server may hold a mix of old and new weights until `load_weights` or `receive_weights` succeeds."""
        loop = asyncio.get_running_loop()

        def send_update(info: dict[str, Any]) -> Future[Any]:
            call = self.post("/update_weights", {"update_info": info}, seconds=LOAD_SECONDS)
            return asyncio.run_coroutine_threadsafe(call, loop)

        async with self._update(on_loaded):
            await self.post("/start_weight_update", seconds=60.0)
            await lend(lambda weights: sender.send(weights, send_update))
            await self.post("/finish_weight_update", {"weight_version": label}, seconds=LOAD_SECONDS)

    async def discard_partial_update(self) -> None:
        """Drop what arrived of an interrupted transfer. Returns once the server no longer waits for the rest.

        vLLM counts what has arrived of each layer, so the rest of an interrupted update would be taken for a part
        of the next one. Loading no weights at all resets the count."""
        if not self._partial_update:
            return
        with contextlib.suppress(ModelServerError):  # It may know of the interruption already, or accept no transfer.
            await self.post("/finish_weight_update", seconds=60.0)
        await self._reload({"weights_iterator": []}, 60.0)
        self._partial_update = False

    async def _reload(self, arguments: Mapping[str, Any], seconds: float) -> None:
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments}, seconds=seconds)

    async def load_adapter(self, name: str, directory: Path) -> None:
        loaded = (await self.model_info()).adapters
        body = {"lora_name": name, "lora_path": str(directory), "load_inplace": name in loaded}
        await self._adapter_request("/v1/load_lora_adapter", body, LOAD_SECONDS)

    async def unload_adapter(self, name: str) -> None:
        await self._adapter_request("/v1/unload_lora_adapter", {"lora_name": name}, 60.0)

    async def _adapter_request(self, path: str, body: Mapping[str, Any], seconds: float) -> None:
        try:
            await self.post(path, body, seconds=seconds)
        except ModelServerError as error:
            if (error.status == 404 and "Not Found" in str(error)) or NOT_ENABLED in str(error):
                raise ConfigError(
                    f"{self.url} takes no adapters ({error}); start it with --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
            if RANK_TOO_LARGE in str(error):
                raise ConfigError(f"{error}; start it with --max-lora-rank of at least the adapter's r") from error
            raise

    async def _resume_if_paused(self) -> None:
        """Resume a server that was left paused by a trainer killed during an update."""
        response = await self.get("/is_paused", optional=True)
        if not isinstance(response, dict):
            message = "its weights cannot be replaced; start it with VLLM_SERVER_DEV_MODE=1"
            raise ConfigError(f"{self.url} has no /is_paused: {message}")
        if response.get("is_paused"):
            self._partial_update = True
            await self.discard_partial_update()
            await self.post("/resume", seconds=60.0)


def validate(params: SamplingParams) -> None:
    """Raises ConfigError for parameters that vLLM would change."""
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"temperature={params.temperature} cannot be used: vLLM would sample at {MIN_TEMPERATURE} instead; use 0 "
            f"or at least {MIN_TEMPERATURE}"
        )


def _is_of_the_likeliest(logprob: float) -> bool:
    """Whether it may be the log-probability of a token among all that top_k=1 keeps: of n tokens, log(1/n)."""
    return any(abs(logprob + math.log(ties)) < 1e-5 for ties in range(1, MOST_TIES + 1))


# -- vllm process ----------------------------------------------------------------------------------------------------

# A vLLM server as a child process: started, awaited until it listens, and ended with us even if we are killed.
#
# It listens on loopback, because its administrative endpoints need no token. Its output goes to a log file; errors
# quote the end of it.

POLL_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
LOG_TAIL = 2000
"""Characters of the log that an error quotes."""


@dataclass(eq=False, repr=False)
class VllmProcess:
    """One server process on a free port, which `restart` starts."""

    transport: Transport
    model: Path
    name: str
    """The model name it serves."""
    log: Path
    command: Sequence[str] = ("vllm",)
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    dtype: str = "auto"
    max_context: int | None = None
    seconds: float = 600.0
    """Time limit until it listens."""

    def __post_init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = JsonClient(self.transport, self.url, seconds=5.0, connect_seconds=2.0)

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def restart(self, directory: Path | None) -> None:
        """End the server, if it runs, and start it with the weights in `directory` (None: its original model). Returns
        when it listens. Raises ServerError with the end of its log."""
        await self.close()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = self._spawn(directory or self.model, log)
        try:
            await self._wait_until_listening(self._process)
        except BaseException:
            await self.close()
            raise

    def _spawn(self, model: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
        words = [*self.command, "serve", str(model), "--served-model-name", self.name, "--dtype", self.dtype]
        words += ["--host", "127.0.0.1", "--port", str(self._port), "--enable-scale-out"]
        words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "21", "--generation-config", "vllm"]
        words += ["--max-model-len", str(self.max_context)] if self.max_context else []
        words += self.args
        required = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        try:
            return subprocess.Popen(
                [sys.executable, "-I", guard_process.__file__, str(GRACE_SECONDS), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **required, **self.env},
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{shlex.join(words)} cannot be started: {error}") from error

    async def _wait_until_listening(self, process: subprocess.Popen[bytes]) -> None:
        end = asyncio.get_running_loop().time() + self.seconds
        while asyncio.get_running_loop().time() < end:
            if process.poll() is not None:
                raise ServerError(
                    f"the vLLM server ended while it started (exit status {process.returncode}){self._log_tail()}"
                )
            with contextlib.suppress(PolicyError):
                return await self._http.get("/health", seconds=2.0)
            await asyncio.sleep(POLL_SECONDS)
        raise ServerError(f"the vLLM server did not listen within {self.seconds:g} s{self._log_tail()}")

    def _log_tail(self) -> str:
        text = self.log.read_bytes()[-LOG_TAIL:].decode("utf-8", errors="replace")
        return f"; its log {self.log} ends:\n{text}"

    async def close(self) -> None:
        """End the server and everything it started. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        await asyncio.to_thread(process.wait)
