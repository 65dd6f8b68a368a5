"""A gateway as agents meet it: behind a real server on loopback, in front of a real store."""

import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import httpx2
import pytest
from openai import AsyncOpenAI
from tests.support.provider import ScriptedProvider
from tests.support.tokenizer import tiny_tokenizer

from agentlightning.attempt_address import attempt_key, attempt_path
from agentlightning.attempt_variables import attempt_environment
from agentlightning.chat.hf import HFChatFormat
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.rollouts import AttemptedRollout
from agentlightning.server.app import Server
from agentlightning.store.base import LightningStoreBase
from agentlightning.testing import ScriptedEngine

SECRET = "a-secret-nobody-prints"

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Reading the certificates of the world takes a client 60 ms, and nobody here meets them."""


@pytest.fixture(scope="session")
def bpe_chat():
    """ChatML and Hermes over a byte-level BPE."""
    return HFChatFormat(tiny_tokenizer())


@dataclass
class Service:
    store: LightningStoreBase
    engine: ScriptedEngine
    gateway: Gateway
    server: Server
    attempted: AttemptedRollout
    exits: AsyncExitStack

    @property
    def environment(self):
        return attempt_environment(self.server.url, SECRET, self.rollout_id, self.attempt_id)

    @property
    def rollout_id(self):
        return self.attempted.rollout_id

    @property
    def attempt_id(self):
        return self.attempted.attempt.attempt_id

    @property
    def key(self):
        return attempt_key(SECRET, self.rollout_id, self.attempt_id)

    @property
    def base_url(self):
        """Names the attempt and holds no key, so that what is sent as API key counts."""
        return f"{self.server.url}{attempt_path(self.rollout_id, self.attempt_id)}/v1"

    @property
    def gate(self):
        return self.gateway.gates.of(self.engine)

    async def client(self, **options) -> AsyncOpenAI:
        options = {"base_url": self.base_url, "api_key": self.key} | options
        http = httpx2.AsyncClient(verify=NO_TLS, timeout=60)
        return await self.exits.enter_async_context(AsyncOpenAI(http_client=http, max_retries=0, **options))

    async def anthropic(self, **options):
        """Anthropic's official client."""
        from anthropic import AsyncAnthropic  # Takes a second to import.

        options = {"base_url": self.base_url.removesuffix("/v1"), "api_key": self.key} | options
        http = httpx2.AsyncClient(verify=NO_TLS, timeout=60)
        return await self.exits.enter_async_context(AsyncAnthropic(http_client=http, max_retries=0, **options))

    async def http(self) -> httpx.AsyncClient:
        """For requests no SDK would make."""
        return await self.exits.enter_async_context(httpx.AsyncClient(verify=NO_TLS, timeout=60))

    async def ask(self, messages="hi", **options):
        """One plain completion."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        client = await self.client()
        return await client.chat.completions.create(model="scripted", messages=messages, **options)

    async def stream(self, **options):
        """All chunks of one streamed completion."""
        client = await self.client()
        messages = [{"role": "user", "content": "hi"}]
        chunks = await client.chat.completions.create(model="scripted", messages=messages, stream=True, **options)
        return [chunk async for chunk in chunks]

    async def spans(self):
        return await self.store.query_spans(self.rollout_id, self.attempt_id)


@pytest.fixture
async def serve(store):
    """serve(script, ...) starts a server with one attempt; gateway options as keywords, `engine` for engine options."""
    async with AsyncExitStack() as exits:

        async def start(script, *, engine=None, use_store=None, **options):
            kept = use_store or store
            scripted = ScriptedEngine(script, **(engine or {}))
            gateway = Gateway(kept, {"scripted": scripted}, secret=SECRET, **options)
            server = await exits.enter_async_context(Server(kept, gateway, secret=SECRET))
            attempted = await kept.start_rollout({"question": "6*7"})
            return Service(kept, scripted, gateway, server, attempted, exits)

        yield start


@pytest.fixture
async def ask(serve):
    """ask(dialect, replies) -> (the service, the provider behind its model "theirs")."""
    async with AsyncExitStack() as exits:

        async def start(dialect, replies, **options):
            provider = await exits.enter_async_context(ScriptedProvider(replies))
            base = provider.url if dialect == "anthropic" else f"{provider.url}/v1"
            them = {"name": "them", "dialect": dialect, "base_urls": [base], "api_key": "sk-theirs-0123456789"}
            rule = {"model": "theirs", "provider": "them", "send_model": "big-1"}
            config = GatewayConfig.model_validate({"providers": [them | options], "routes": [rule]})
            return await serve([], config=config), provider

        yield start


@pytest.fixture
def secret():
    return SECRET


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The directory of a model small enough for every test."""
    from tests.support.models import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def serve_tiny(store, tiny):
    """serve_tiny(...) starts a server whose model "scripted" is a real one; options of the policy as keywords."""
    from agentlightning.policy.config import LocalPolicyConfig
    from agentlightning.policy.local import LocalPolicy

    async with AsyncExitStack() as exits:

        async def start(**options):
            config = LocalPolicyConfig.model_validate({"model": tiny, "device": "cpu", "name": "scripted"} | options)
            policy = LocalPolicy.open(config)
            exits.push_async_callback(policy.close)
            gateway = Gateway(store, {"scripted": policy}, secret=SECRET)
            server = await exits.enter_async_context(Server(store, gateway, secret=SECRET))
            attempted = await store.start_rollout({"question": "6*7"})
            return Service(store, policy, gateway, server, attempted, exits)

        yield start
