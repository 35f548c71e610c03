"""The packages of OpenAI and Anthropic as clients. They read no certificates: that takes longer than a request here."""

import anthropic
import openai

from tests.support.service.serving import Serving

ONCE = {"max_retries": 0, "timeout": 60}


def openai_client(server: Serving, key: str | None = None) -> openai.OpenAI:
    """key: instead of the server's own."""
    plain, key = openai.DefaultHttpxClient(verify=False), key or server.key or "none"
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=plain, **ONCE)


def anthropic_client(server: Serving) -> anthropic.Anthropic:
    plain = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=server.url, api_key=server.key, http_client=plain, **ONCE)
