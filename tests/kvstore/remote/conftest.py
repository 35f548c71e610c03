"""Buckets for the tests of a file, and a Redis that a test may harm."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.buckets import AzureServer, Directory, S3Server, azure_server, s3_server
from tests.support.redis_server import RedisServer

BUCKETS = ["directory", "s3", "azure"]


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    with pytest.MonkeyPatch.context() as patch, azure_server(patch) as server:
        yield server


@pytest.fixture
def bucket_named(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Directory | S3Server | AzureServer]:
    """Empty. A test that does something to the server starts one of its own."""

    def find(name: str) -> Directory | S3Server | AzureServer:
        if name == "directory":
            return Directory(tmp_path / "objects")
        server: S3Server | AzureServer = request.getfixturevalue(name)
        server.clear()
        return server

    return find


@pytest.fixture(params=BUCKETS)
def bucket(request: pytest.FixtureRequest, bucket_named):
    return bucket_named(request.param)
