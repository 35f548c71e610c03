"""Engines for conversations: one with a store, and one store that is opened again and again."""

import pytest

from kvstore import Engine
from tests.support.engines import open_engine


@pytest.fixture
def engine(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture
def opened(model, tmp_path):
    """Opens the same store again and again; what was open before is closed in order."""
    engines: list[Engine] = []

    def again(**options) -> Engine:
        close(engines)
        engines.append(open_engine(options.pop("model", model), tmp_path / "store", **options))
        return engines[-1]

    yield again
    close(engines)


def close(engines: list[Engine]) -> None:
    while engines:
        engines[-1].check_integrity()
        engines.pop().close()
