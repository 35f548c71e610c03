"""What tests of engines share: a store that is opened again and again, a Redis, the secret of a fleet."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import Engine
from tests.support.buckets import Directory
from tests.support.engines import open_engine
from tests.support.redis_server import RedisServer, wait_for_answers

IN_MEMORY, ROOM_BYTES = Path("/dev/shm"), 2 << 30


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Tests that are coroutines run in an event loop of their module."""
    return "asyncio"


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory, if there is room: processes are killed here, but no machine loses its power, and each sync of a disk
    takes as long as a turn of these models.
    """
    if not IN_MEMORY.is_dir() or shutil.disk_usage(IN_MEMORY).free < ROOM_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=IN_MEMORY, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def engine(model: str, store: Path) -> Iterator[Engine]:
    with open_engine(model, store) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture
def opened(model: str, store: Path) -> Iterator[Callable[..., Engine]]:
    """Opens the same store again and again; what was open before is closed in order."""
    engines: list[Engine] = []

    def close() -> None:
        while engines:
            engines[-1].check_integrity()
            engines.pop().close()

    def again(**options) -> Engine:
        close()
        engines.append(open_engine(options.pop("model", model), store, **options))
        return engines[-1]

    yield again
    close()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")


@pytest.fixture(scope="module")
def redis_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(redis_of_all: RedisServer, fleet: None) -> RedisServer:
    """Empty. A test that does something to the server starts one of its own."""
    redis_of_all.ask("FLUSHALL")
    return redis_of_all


@pytest.fixture(params=["redis", "objects"])
def shared(
    request: pytest.FixtureRequest, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RedisServer | Directory:
    """What is shared. It is waited for."""
    if request.param == "objects":
        return Directory(tmp_path / "objects")
    wait_for_answers(monkeypatch)
    return redis
