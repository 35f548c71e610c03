"""The `openai` package as a client of a module's server."""

import pytest

from tests.support.service.packages import openai_client


@pytest.fixture
def client(server):
    with openai_client(server) as one:
        yield one
    server.wait_until_idle()
