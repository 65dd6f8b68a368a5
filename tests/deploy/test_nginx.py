"""Several real servers on one PostgreSQL database behind a real nginx: each attempt stays with one of them."""

import asyncio
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from tests.deploy.kubernetes import ROOT
from tests.support.postgres import PostgresCluster, PostgresNotFoundError, find_programs

from agentlightning.attempt_address import attempt_secret
from agentlightning.attempt_variables import attempt_environment
from agentlightning.store.http.client import LightningStoreClient

AGL = str(Path(sys.executable).parent / "agl")
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
ROUTES = '[[routes]]\nmodel = "*"\nprovider = "them"\n\n[[providers]]\nname = "them"\nbase_urls = ["{}/v1"]\n'
ATTEMPTS, CALLS = 24, 5


def has_postgres():
    try:
        return bool(find_programs())
    except PostgresNotFoundError:
        return False


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@contextmanager
def nginx(folder, port, ports):
    """nginx with our configuration, for other ports."""
    text = (ROOT / "deploy" / "nginx" / "agentlightning.conf").read_text()
    text = re.sub(r"( +server 127\.0\.0\.1):\d+( .*\n)(?: +server .*\n)*", "SERVERS", text, count=1)
    text = text.replace("SERVERS", "".join(f"    server 127.0.0.1:{p} max_fails=1 fail_timeout=2s;\n" for p in ports))
    text = text.replace("listen 4747;", f"listen 127.0.0.1:{port};")
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    path = folder / "nginx.conf"
    path.write_text(
        f"daemon off;\nuser root;\nworker_processes 2;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log;\n"
        f"events {{ worker_connections 1024; }}\nhttp {{\naccess_log off;\n{places}\n{text}\n}}\n"
    )
    process = subprocess.Popen([NGINX, "-c", str(path), "-e", str(folder / "error.log")])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


async def until_ready(url):
    async with asyncio.timeout(60), httpx.AsyncClient() as client:
        while True:
            try:
                if (await client.get(f"{url}/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


@contextmanager
def servers(folder, database, ports, provider):
    """One `agl serve` for each port; each is known to the provider by its key."""
    (folder / "routes.toml").write_text(ROUTES.format(provider) + 'api_key_env = "THEIR_KEY"\n')
    started = []
    for port in ports:
        arguments = ["serve", "--port", str(port), "--store", database, "--routes", str(folder / "routes.toml")]
        log = (folder / f"{port}.log").open("wb")
        environment = {"PATH": "/usr/bin:/bin", "THEIR_KEY": f"key-{port}", "HOME": str(folder)}
        started.append(subprocess.Popen([AGL, *arguments], cwd=folder, env=environment, stdout=log, stderr=log))
        log.close()
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(NGINX is None, reason="no nginx: apt-get install nginx-light")
@pytest.mark.skipif(not has_postgres(), reason="no PostgreSQL: apt-get install postgresql")
async def test_each_attempt_stays_with_one_server_and_a_stopped_server_costs_no_call(tmp_path):
    seen = defaultdict(list)

    async def answer(request):
        content = (await request.json())["messages"][0]["content"]
        seen[content].append(request.headers["authorization"])
        await asyncio.sleep(0.05)
        message = {"role": "assistant", "content": "Hello."}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response({"id": "c", "object": "chat.completion", "choices": choices, "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    provider = f"http://127.0.0.1:{runner.addresses[0][1]}"
    ports = [free_port() for _ in range(3)]
    with (
        PostgresCluster() as cluster,
        servers(tmp_path, cluster.new_database(), ports, provider) as processes,
        nginx(tmp_path, free_port(), ports) as url,
    ):
        for port in ports:
            await until_ready(f"http://127.0.0.1:{port}")
        store = LightningStoreClient(url)
        attempts = [await store.start_rollout({"n": n}) for n in range(ATTEMPTS)]
        async with httpx.AsyncClient(timeout=60) as client:

            async def call(number):
                ids = attempts[number].rollout_id, attempts[number].attempt.attempt_id
                variables = attempt_environment(url, attempt_secret(None), *ids)
                by_key = number % 2  # the other half names the attempt in the URL
                base = f"{url}/v1" if by_key else variables["OPENAI_BASE_URL"]
                body = {"model": "theirs", "messages": [{"role": "user", "content": str(number)}]}
                headers = {"authorization": f"Bearer {variables['AGL_KEY']}"}
                response = await client.post(f"{base}/chat/completions", json=body, headers=headers)
                assert response.status_code == 200, response.text

            for _ in range(CALLS):
                await asyncio.gather(*map(call, range(ATTEMPTS)))
            assert {len(set(keys)) for keys in seen.values()} == {1}
            assert len({keys[0] for keys in seen.values()}) == len(ports)

            calling = [asyncio.create_task(call(number)) for _ in range(10) for number in range(ATTEMPTS)]
            await asyncio.sleep(0.1)
            processes[0].send_signal(signal.SIGTERM)
            await asyncio.gather(*calling)
            assert await asyncio.to_thread(processes[0].wait, 30) == 0
            await asyncio.gather(*map(call, range(ATTEMPTS)))
        kept = [await store.query_spans(each.rollout_id) for each in attempts]
        assert [len(spans) for spans in kept] == [CALLS + 11] * ATTEMPTS
        await store.close()
    await runner.cleanup()
