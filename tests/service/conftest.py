"""Fixtures of several files: a server as two tenants see it, a browser's pages, commands without settings."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.service.command import cli, terminal
from kvstore.service.http.telling import LOGGER, JsonFormatter, TextFormatter
from tests.support.redis_server import RedisServer, wait_for_answers
from tests.support.service.browser import Tabs, chromium
from tests.support.service.server_process import without_progress
from tests.support.service.serving import Serving
from tests.support.service.talking import tenants
from tests.support.shared_sessions import SECRET_TEXT


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Serving]]:
    with tenants(tmp_path_factory.mktemp("keys")) as servers:
        yield servers


@pytest.fixture
def server(both: tuple[Serving, Serving]) -> Iterator[Serving]:
    """As its first tenant sees it; nothing may be left of a test."""
    yield both[0]
    both[0].wait_until_idle()


@pytest.fixture
def fleet_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET_TEXT)


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet_secret: None) -> Iterator[RedisServer]:
    """A Redis of the test's fleet. Servers of this process do not give it up for being slow."""
    wait_for_answers(monkeypatch)
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def tabs(browser: Any) -> Iterator[Tabs]:
    """At the end no console may have said anything that the test did not expect, a broken content policy included."""
    opened = Tabs(browser)
    yield opened
    opened.close()
    assert opened.errors == []


@pytest.fixture
def page(server: Serving, tabs: Tabs) -> Any:
    """The chat page of the module's server, as a person sees it who has just come."""
    return tabs.open(server.url)


@pytest.fixture
def lines(own_logging: None) -> dict[str, list[str]]:
    """What is logged, by both formats."""
    found: dict[str, list[str]] = {"text": [], "json": []}

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found["text"].append(TextFormatter().format(record))
            found["json"].append(JsonFormatter().format(record))

    LOGGER.addHandler(Keep())
    LOGGER.setLevel(logging.INFO)
    return found


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No settings but those of the test; gives the home, which is not there yet."""
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], no_settings: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; gives (exit code, stdout, stderr)."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = cli.main(list(map(str, argv)))
        captured = capsys.readouterr()
        return code, captured.out, without_progress(captured.err)

    return call


@pytest.fixture
def chat_opens(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Takes what `kvstore chat` opens instead of an engine."""
    return lambda engine: monkeypatch.setattr(terminal, "open_engine", engine)
