"""`ScriptedModelServer`: vLLM's and SGLang's HTTP endpoints on loopback, with predictable answers and no model.

    async with ScriptedModelServer() as server:      # vLLM 0.32's; dialect="sglang" for SGLang's
        server.url, server.calls, server.label, ...

An answer counts up from the last token of its prompt to token 199, then continues at 3, so that gaps and repetitions
are visible when several servers sample one answer; token 2 ends an answer of `ends_at` tokens. Log-probabilities are a
function of the token and the label of the weights (`logprob_of`). Failures are scheduled beforehand.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from aiohttp import web

END, FIRST, LAST = 2, 3, 199

Action = Callable[[Any], dict[str, Any]]
"""From the body of a request to the JSON of its response."""


def next_token(token: int) -> int:
    return token + 1 if FIRST <= token < LAST else FIRST


def logprob_of(token: int, label: str) -> float:
    """A fixed function of the token and the label of the weights."""
    return -(token % 7 + 1) / 8 - (sum(label.encode()) % 16) / 256


class ScriptedModelServer:
    """An async context manager. `generates=False`: vLLM without `--enable-scale-out`. `labels=False`: a vLLM version
    without weight labels. `admin=False`: without VLLM_SERVER_DEV_MODE. `raw`: log-probabilities at temperature 1.
    `ties`: tokens that are equally likely, and likelier than all others. `receives`: its `workers` receive weights
    without the disk. `lora=False`: it takes no adapters."""

    def __init__(
        self,
        *,
        model: str = "tiny",
        context_length: int = 1024,
        dialect: Literal["vllm", "sglang"] = "vllm",
        generates: bool = True,
        labels: bool = True,
        admin: bool = True,
        raw: bool = False,
        ties: int = 1,
        receives: bool = False,
        lora: bool = True,
        workers: int = 1,
        token: str | None = None,
        port: int = 0,
    ) -> None:
        self.model = model
        self.context_length = context_length
        self.dialect = dialect
        self.label = "default"
        self.weights: str | None = None
        """Directory of the loaded weights."""
        self.invited: dict[str, Any] | None = None
        """The init info that its workers got for weight transfer."""
        self.received: list[dict[str, Any]] = []
        """Update infos received since the last replacement of the weights."""
        self.silent = False
        """Whether weight updates hang forever."""
        self.adapters: dict[str, str] = {}
        self.calls: list[tuple[str, Any]] = []
        """Path with query, and body, of each request."""
        self.running = 0
        """Number of answers being sampled."""
        self.sampled = 0
        """Number of tokens so far."""
        self.peers: set[Any] = set()
        """Addresses of the clients."""
        self.ends_at: int | None = None
        """Number of tokens after which an answer ends."""
        self.break_after: int | None = None
        """Number of tokens after which the next answer's connection is aborted."""
        self.failures: dict[str, list[int]] = {}
        """Path -> statuses of the next responses, one per request."""
        self.delay = 0.0
        """Seconds before each token."""
        self.kv_cache_usage: float | None = None
        """What its metrics report; None: it has no metrics, unless it has `cache_answers`."""
        self.cache_answers: int | None = None
        """The number of running answers that fill its key-value cache."""
        self.most_running = 0
        """The largest number of answers that were sampled at the same time."""
        self.holds: Callable[[], bool] = lambda: False
        """Whether answers wait now, other than greedy ones, as those of a full server do. How fast callers come then
        decides nothing."""
        self.port = port
        self._generates, self._labels, self._admin, self._raw = generates, labels, admin, raw
        self._ties = ties
        self._receives, self._workers = receives, workers
        self._lora = lora
        self._updating = self._half = False
        self._token = token
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Number of connections so far."""
        return len(self.peers)

    @property
    def paused(self) -> bool:
        return not self._unpaused.is_set()

    def paths(self) -> list[str]:
        """Paths of the requests that change state, in order."""
        quiet = (
            "/v1/models",
            "/health",
            "/weight_info",
            "/is_paused",
            "/get_model_info",
            "/get_world_size",
            "/metrics",
        )
        return [path.split("?")[0] for path, _ in self.calls if not path.startswith(quiet)]

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._record_request])
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # -- paths -----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _record_request(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await _body(request)
        self.calls.append((request.path_qs, body))
        if request.transport is not None:
            self.peers.add(request.transport.get_extra_info("peername"))
        if self._token is not None and request.headers.get("authorization") != f"Bearer {self._token}":
            return _error(401, "Unauthorized")
        if statuses := self.failures.get(request.path):
            self._half |= request.path == "/collective_rpc"
            return _error(statuses.pop(0), "scheduled failure")
        return await handler(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await _body(request)
        common: dict[str, Action] = {"/v1/models": self._models, "/health": lambda body: {}}
        if path == "/metrics" and (usage := self._usage()) is not None:
            return web.Response(text=self._metrics(usage))
        own = self._vllm() if self.dialect == "vllm" else self._sglang()
        if path in ("/inference/v1/generate", "/v1/completions", "/generate") and self._samples(path):
            return await self._sample(request, body)
        if path == "/update_weights" and self.silent:
            await asyncio.Event().wait()
        action = {**common, **own}.get(path)
        try:
            return _error(404, "Not Found") if action is None else web.json_response(action(body))
        except _Rejected as error:
            if self.dialect == "sglang":
                return web.json_response({"success": False, "error_message": str(error)}, status=400)
            return _error(500, str(error))

    def _usage(self) -> float | None:
        return self.kv_cache_usage if self.cache_answers is None else min(1.0, self.running / self.cache_answers)

    def _metrics(self, usage: float) -> str:
        name = "vllm:kv_cache_usage_perc" if self.dialect == "vllm" else "sglang:token_usage"
        idle, busy = f'{name}{{engine="0"}} 0.0', f'{name}{{engine="1"}} {usage}'
        return f"# HELP {name} 1 is 100 percent\n# TYPE {name} gauge\n{idle}\n{busy}\n"

    def _samples(self, path: str) -> bool:
        known = {"/generate"} if self.dialect == "sglang" else {"/v1/completions"}
        return path in (known | {"/inference/v1/generate"} if self._generates and self.dialect == "vllm" else known)

    def _vllm(self) -> dict[str, Action]:
        adapters: dict[str, Action] = {
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        labels: dict[str, Action] = {
            "/weight_info": lambda body: {"weight_version": self.label},
            "/update_weight_version": self._relabel,
        }
        admin: dict[str, Action] = {
            "/is_paused": lambda body: {"is_paused": self.paused},
            "/pause": self._pause,
            "/resume": self._resume,
            "/collective_rpc": self._reload,
            "/reset_prefix_cache": lambda body: {"success": True},
            **(labels if self._labels else {}),
            "/get_world_size": lambda body: {"world_size": self._workers},
            "/init_weight_transfer_engine": self._invite,
            "/shutdown_weight_transfer_engine": lambda body: {},
            "/start_weight_update": self._start,
            "/update_weights": self._take,
            "/finish_weight_update": self._finish,
        }
        return {**adapters, **(admin if self._admin else {})}

    def _sglang(self) -> dict[str, Action]:
        return {
            "/get_model_info": lambda body: {"model_path": self.weights, "weight_version": self.label},
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/update_weights_from_disk": self._update,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
        }

    def _models(self, _: Any) -> dict[str, Any]:
        base = {"id": self.model, "object": "model", "parent": None, "max_model_len": self.context_length}
        return {"data": [base, *({"id": name, "parent": self.model} for name in self.adapters)]}

    def _pause(self, _: Any) -> dict[str, Any]:
        self._unpaused.clear()
        return {"status": "paused"}

    def _resume(self, _: Any) -> dict[str, Any]:
        self._unpaused.set()
        return {"status": "resumed"}

    def _reload(self, body: Mapping[str, Any]) -> dict[str, Any]:
        arguments = body["kwargs"]
        if arguments.get("weights_iterator") == []:
            self._half = False
        else:  # Like vLLM, which takes what is left of weights that did not all come for part of what it reads.
            self.weights = "a mixture" if self._half else arguments["weights_path"]
        return {"results": [None]}

    def _invite(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if not self._receives:
            raise _Rejected("Weight transfer not configured.")
        self.invited = dict(body["init_info"])
        return {}

    def _start(self, _: Any) -> dict[str, Any]:
        if not self._receives or self._updating:
            raise _Rejected("start_weight_update called while a weight update is already active")
        self._updating, self.received = True, []
        return {}

    def _take(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if not self._updating:
            raise _Rejected("start_weight_update must be called before update_weights.")
        self._half = True
        self.received.append(dict(body["update_info"]))
        return {}

    def _finish(self, body: Mapping[str, Any] | None) -> dict[str, Any]:
        if not self._updating:
            raise _Rejected("finish_weight_update called without a matching start_weight_update.")
        self._updating = self._half = False
        if body and body.get("weight_version"):
            self.label, self.weights = body["weight_version"], None
        return {}

    def _relabel(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.label = body["new_version"]
        return {"success": True}

    def _update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.weights, self.label = body["model_path"], body["weight_version"]
        return {"success": True, "message": ""}

    def _load_adapter(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if not self._lora:
            raise _Rejected("LoRA is not enabled. Use --enable-lora to enable LoRA.")
        if body["lora_name"] in self.adapters and not body.get("load_inplace"):
            raise _Rejected(f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return {"success": True}

    def _unload_adapter(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.adapters.pop(body["lora_name"], None) is None:
            raise _Rejected(f"The lora adapter '{body['lora_name']}' cannot be found.")
        return {"success": True}

    def restart(self) -> None:
        """Reset to the state after a restart: original weights, no adapters."""
        self.label, self.weights = "default", None
        self.invited, self._updating, self._half = None, False, False
        self.adapters.clear()

    # -- sampling --------------------------------------------------------------------------------------------------

    async def _sample(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        prompt = body.get("token_ids") or body.get("prompt") or body.get("input_ids") or []
        if not prompt:
            return _error(400, "token_ids must not be empty")
        asked = body.get("lora_path") if self.dialect == "sglang" else body.get("model")
        if asked not in (None, self.model, *self.adapters):
            return _error(400 if self.dialect == "sglang" else 404, f"The model `{asked}` does not exist.")
        if len(prompt) >= self.context_length:
            return _error(400, f"longer than the maximum model length of {self.context_length}")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await _Answer(self, request, body, prompt).run()
        finally:
            self.running -= 1

    async def wait(self, sampling: Mapping[str, Any]) -> None:
        """Wait until the next token may be sampled."""
        await asyncio.sleep(self.delay)
        is_greedy = sampling.get("temperature") == 0 or sampling.get("top_k") == 1
        while not is_greedy and self.holds():  # noqa: ASYNC110  A function of anything sets no event.
            await asyncio.sleep(0.005)
        await self._unpaused.wait()

    def logprob(self, token: int, sampling: Mapping[str, Any]) -> float:
        is_likeliest = sampling.get("top_k") == 1 and not self._raw
        return -math.log(self._ties) if is_likeliest else logprob_of(token, self.label)


class _Rejected(Exception):
    """A request that vLLM's workers reject, with status 500."""


class _Answer:
    """One answer, in the format of its endpoint."""

    def __init__(self, server: ScriptedModelServer, request: web.Request, body: Mapping[str, Any], prompt: list[int]):
        self.server = server
        self.request = request
        self.body = body
        self.sampling: Mapping[str, Any] = body.get("sampling_params") or body
        self.last = prompt[-1]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.labels: list[str] = []
        self.broken = server.break_after
        server.break_after = None

    async def run(self) -> web.StreamResponse:
        if not self.body.get("stream"):
            while self.reason is None:
                if not await self.step():
                    return web.Response()
            return web.json_response(self.event(0))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(self.request)
        while self.reason is None:
            if not await self.step():
                return response
            await response.write(b"data: " + json.dumps(self.event(len(self.tokens) - 1)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def step(self) -> bool:
        """Sample a token; False if the connection was aborted instead."""
        if self.broken is not None and len(self.tokens) >= self.broken:
            if self.request.transport is not None:
                self.request.transport.abort()
            return False
        await self.server.wait(self.sampling)
        ends = self.server.ends_at is not None and len(self.tokens) + 1 >= self.server.ends_at
        self.last = END if ends else next_token(self.last)
        self.tokens.append(self.last)
        self.logprobs.append(self.server.logprob(self.last, self.sampling))
        self.labels.append(self.server.label)
        self.server.sampled += 1
        return True

    @property
    def reason(self) -> str | None:
        if self.tokens and self.tokens[-1] in self.sampling.get("stop_token_ids", ()):
            return "stop"
        most = self.sampling.get("max_tokens") or self.sampling.get("max_new_tokens")
        return "length" if len(self.tokens) == most else None

    def event(self, start: int) -> dict[str, Any]:
        if self.request.path == "/generate":
            return self._sglang()
        wire = self._completion if self.request.path == "/v1/completions" else self._generate
        return {"choices": [{"index": 0, "finish_reason": self.reason, **wire(start)}]}

    def _generate(self, start: int) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": value, "top_logprobs": self._tops(token, value)}
            for token, value in zip(self.tokens[start:], self.logprobs[start:], strict=True)
        ]
        spans: list[dict[str, Any]] = []
        for index, label in enumerate(self.labels if self.reason else ()):
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": index, "end": index})
            spans[-1]["end"] = index + 1
        return {
            "token_ids": self.tokens[start:],
            "logprobs": {"content": content},
            "weight_versions": (spans or None) if self.server._labels else None,  # pyright: ignore[reportPrivateUsage]
        }

    def _completion(self, start: int) -> dict[str, Any]:
        pairs = list(zip(self.tokens[start:], self.logprobs[start:], strict=True))
        return {
            "text": "",
            "token_ids": [token for token, _ in pairs],
            "logprobs": {
                "tokens": [f"token_id:{token}" for token, _ in pairs],
                "token_logprobs": [value for _, value in pairs],
                "top_logprobs": [
                    {f"token_id:{top['token_id']}": top["logprob"] for top in self._tops(token, value)}
                    for token, value in pairs
                ],
            },
        }

    def _sglang(self) -> dict[str, Any]:
        reason = {"type": self.reason} if self.reason else None
        pairs = list(zip(self.tokens, self.logprobs, strict=True))
        meta: dict[str, Any] = {
            "finish_reason": reason,
            "completion_tokens": len(pairs),
            "output_token_logprobs": [[value, token, None] for token, value in pairs],
            "weight_version": self.server.label,
        }
        if most := self.body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [
                [[top["logprob"], top["token_id"], None] for top in self._tops(token, value, most)]
                for token, value in pairs
            ]
        return {"output_ids": self.tokens, "meta_info": meta}

    def _tops(self, token: int, logprob: float, most: int | None = None) -> list[dict[str, Any]]:
        """vLLM: the token drawn first, then others, likelier ones; SGLang: by likelihood alone."""
        count = most if most is not None else int(self.sampling.get("logprobs") or 0)
        others = [{"token_id": 200 + index, "logprob": logprob + 0.01 * (count - index)} for index in range(1, count)]
        drawn = {"token_id": token, "logprob": logprob}
        return [*others, drawn] if most is not None else [drawn, *others]


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "Error", "code": status}}, status=status)


async def _body(request: web.Request) -> Any:
    content = await request.read()
    return json.loads(content) if content else None
