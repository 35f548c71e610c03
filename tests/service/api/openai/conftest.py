"""The `openai` package as a client of a module's server."""

import openai
import pytest


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key or "none", max_retries=0, timeout=60) as one:
        yield one
    server.wait_until_idle()
