"""A server for a browser; without one, its tests are skipped before it starts."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.service.serving import Serving, serving


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[Serving]:
    with serving() as running:
        yield running
