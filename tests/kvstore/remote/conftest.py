"""A Redis and a bucket for the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buckets import AzureServer, Directory, S3Server, azure_server, s3_server
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    """Empty. A test that does something to the server starts one of its own."""
    shared_redis.ask("FLUSHALL")
    return shared_redis


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    with pytest.MonkeyPatch.context() as patch, azure_server(patch) as server:
        yield server


@pytest.fixture(params=["directory", "s3", "azure"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Directory | S3Server | AzureServer:
    """Empty. A test that does something to the server starts one of its own."""
    if request.param == "directory":
        return Directory(tmp_path / "objects")
    server: S3Server | AzureServer = request.getfixturevalue(request.param)
    server.clear()
    return server
