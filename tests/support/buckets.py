"""Places for objects that tests look into and harm: a directory, a bucket of a real S3 server, an Azure container.

names: of what lies below the prefix of `url`. A test is skipped where obstore, or moto for S3, or Azurite for Azure, is
not installed.
"""

import hashlib
import hmac
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.redis_server import free_port
from tests.support.waiting import wait_until


def need_obstore() -> None:
    if importlib.util.find_spec("obstore") is None:
        pytest.skip("obstore is not installed")


class Directory:
    """As a network file system that several servers have mounted."""

    def __init__(self, folder: Path) -> None:
        need_obstore()
        self.folder = folder
        folder.mkdir()
        self.url = f"file://{folder}"

    def names(self) -> list[str]:
        return sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def set(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self.folder / name).unlink()

    def age(self, name: str, seconds: float) -> None:
        found = (self.folder / name).stat().st_mtime
        os.utime(self.folder / name, (found - seconds, found - seconds))

    def clear(self) -> None:
        for name in self.names():
            self.delete(name)


class ObjectServer:
    """Of a process of its own, which a test may harm."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class S3Server(ObjectServer):
    """moto's, in a process of its own; what it has is gone when it ends. keys: it lets nobody in without."""

    bucket, prefix = "kv-blocks", "fleet/a"

    def __init__(self, keys: bool = False) -> None:
        need_obstore()
        if any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "flask_cors")):
            pytest.skip("no S3 server: pip install 'moto[s3]' flask flask-cors")
        self.port, self.url = free_port(), f"s3://{self.bucket}/{self.prefix}"
        self._environment = {**os.environ, **({"INITIAL_NO_AUTH_ACTION_COUNT": "4"} if keys else {})}
        self.key, self.secret = "anybody", "not-checked"
        self.start()
        if keys:
            self._make_user()

    def environment(self, port: int) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret,
        }  # fmt: skip

    def start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        log = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        wait_until(self._answers, "moto's server does not answer")
        self.make_bucket()

    def _answers(self) -> bool:
        assert self.process.poll() is None, "moto's server has ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=5).close()
        except OSError:
            return False
        return True

    def make_bucket(self) -> None:
        self._ask("PUT", f"/{self.bucket}")

    def delete_bucket(self) -> None:
        """Also while others write into it."""

        def is_deleted() -> bool:
            self.clear()
            try:
                self._ask("DELETE", f"/{self.bucket}")
            except urllib.error.HTTPError as error:
                assert error.code == 409, error
                return False
            return True

        wait_until(is_deleted)

    def names(self) -> list[str]:
        found = self._ask("GET", f"/{self.bucket}?list-type=2").decode()
        return [key.removeprefix(self.prefix + "/") for key in re.findall("<Key>(.*?)</Key>", found)]

    def get(self, name: str) -> bytes:
        return self._ask("GET", f"/{self.bucket}/{self.prefix}/{name}")

    def set(self, name: str, data: bytes) -> None:
        self._ask("PUT", f"/{self.bucket}/{self.prefix}/{name}", data)

    def delete(self, name: str) -> None:
        self._ask("DELETE", f"/{self.bucket}/{self.prefix}/{name}")

    def clear(self) -> None:
        for name in self.names():
            self.delete(name)

    def _ask(self, method: str, path: str, data: bytes = b"", service: str = "s3") -> bytes:
        scope = f"AWS4-HMAC-SHA256 Credential={self.key}/20260101/us-east-1/{service}/aws4_request"
        address = f"http://127.0.0.1:{self.port}{path}"
        kind = "application/octet-stream" if service == "s3" else "application/x-www-form-urlencoded"
        headers = {"Authorization": scope, "Content-Type": kind}
        request = urllib.request.Request(address, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def _make_user(self) -> None:
        """Whoever has its keys may do everything; from now on nobody else may."""

        def act(**form: str) -> str:
            return self._ask("POST", "/", urlencode(form).encode(), "iam").decode()

        policy = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'
        act(Action="CreateUser", UserName="kv", Version="2010-05-08")
        act(Action="PutUserPolicy", UserName="kv", PolicyName="all", PolicyDocument=policy, Version="2010-05-08")
        made = act(Action="CreateAccessKey", UserName="kv", Version="2010-05-08")
        self.key = re.findall("<AccessKeyId>(.*?)<", made)[0]
        self.secret = re.findall("<SecretAccessKey>(.*?)<", made)[0]


@contextmanager
def s3_server(patch: pytest.MonkeyPatch, keys: bool = False) -> Iterator[S3Server]:
    """One that whoever reads the environment finds."""
    server = S3Server(keys)
    try:
        for name, value in server.environment(server.port).items():
            patch.setenv(name, value)
        yield server
    finally:
        server.kill()


class AzureServer(ObjectServer):
    """Azurite, in a process of its own; what it has is gone when it ends."""

    container, prefix, account, key = "kv-blocks", "fleet/a", "fleet", b64encode(b"the key of this account").decode()

    def __init__(self) -> None:
        need_obstore()
        if shutil.which("azurite-blob") is None:
            pytest.skip("no Azure server: npm install --global azurite")
        self.port, self.url = free_port(), f"az://{self.container}/{self.prefix}"
        self.start()
        self._store = self._open()

    def environment(self, port: int) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account, "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{self.account}",
        }  # fmt: skip

    def start(self) -> None:
        flags = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
        environment = {**os.environ, "AZURITE_ACCOUNTS": f"{self.account}:{self.key}"}
        command, log = ["azurite-blob", "--blobPort", str(self.port), *flags], subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        wait_until(self._has_container, "Azurite does not answer")

    def _has_container(self) -> bool:
        """Make it. Signed by https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key."""
        assert self.process.poll() is None, "Azurite has ended"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        named = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = f"PUT{12 * chr(10)}{named}/{self.account}/{self.account}/{self.container}\nrestype:container"
        signature = b64encode(hmac.digest(b64decode(self.key), text.encode(), hashlib.sha256)).decode()
        headers["Authorization"] = f"SharedKey {self.account}:{signature}"
        address = f"http://127.0.0.1:{self.port}/{self.account}/{self.container}?restype=container"
        try:
            urllib.request.urlopen(urllib.request.Request(address, headers=headers, method="PUT"), timeout=60).close()
        except OSError:
            return False
        return True

    def _open(self) -> Any:
        from obstore.store import AzureStore

        config: Any = {name.lower(): value for name, value in self.environment(self.port).items()}
        return AzureStore(self.container, prefix=self.prefix, config=config, client_options={"allow_http": True})

    def names(self) -> list[str]:
        return sorted(one["path"] for some in self._store.list() for one in some)

    def get(self, name: str) -> bytes:
        return bytes(self._store.get(name).bytes())

    def set(self, name: str, data: bytes) -> None:
        self._store.put(name, data)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def clear(self) -> None:
        for name in self.names():
            self.delete(name)


@contextmanager
def azure_server(patch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    """One that whoever reads the environment finds."""
    server = AzureServer()
    try:
        for name, value in server.environment(server.port).items():
            patch.setenv(name, value)
        yield server
    finally:
        server.kill()
