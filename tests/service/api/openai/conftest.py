"""The `openai` package as a client of a module's server."""

import openai
import pytest

from tests.support.service.serving import KEY


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as one:
        yield one
    server.wait_until_idle()
