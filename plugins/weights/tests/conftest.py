"""A server that speaks S3, in a process of its own (moto; plugins/weights/tests/setup.sh makes its environment)."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

FOLDER = Path(os.environ.get("AGL_MOTO") or Path(__file__).parents[3] / ".peers" / "moto")
VARIABLES = {"AWS_ACCESS_KEY_ID": "admin", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class S3:
    """The server, and what its operator does."""

    def __init__(self, address: str) -> None:
        self.address = address

    def bucket(self) -> str:
        """The name of a new one."""
        name = f"bucket-{uuid4().hex[:12]}"
        self.client("s3").create_bucket(Bucket=name)
        return name

    def buckets(self) -> list[str]:
        return [each["Name"] for each in self.client("s3").list_buckets()["Buckets"]]

    def reader(self) -> dict[str, str]:
        """The variables of a user who may read every bucket and write none. From now on, the server asks who calls."""
        iam, name = self.client("iam"), f"reader-{uuid4().hex[:8]}"
        iam.create_user(UserName=name)
        rule = '{"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}'
        document = f'{{"Version": "2012-10-17", "Statement": [{rule}]}}'
        iam.put_user_policy(UserName=name, PolicyName="read", PolicyDocument=document)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        self.check_callers(True)
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def check_callers(self, wanted: bool) -> None:
        calls_without = b"0" if wanted else b"inf"
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.address}/moto-api/reset-auth", calls_without, headers)
        urllib.request.urlopen(request, timeout=30).close()

    def client(self, service: str) -> Any:
        from botocore.session import Session

        return Session().create_client(service, endpoint_url=self.address)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    program = FOLDER / "bin" / "moto_server"
    if not program.exists() or find_spec("s3fs") is None:
        pytest.skip("needs a server that speaks S3, and s3fs: run plugins/weights/tests/setup.sh and pip install s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/moto-api/", process)
        yield S3(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Clients of this process find the server by their environment."""
    from s3fs import S3FileSystem

    for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": s3_server.address}.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    yield s3_server
    s3_server.check_callers(False)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.URLError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
