"""Two tenants on one server: a request of very many sequences beside a small one of somebody else, over HTTP."""

import pytest
from serving import serving

KEYS = {"anna": "key-of-anna", "bert": "key-of-bert"}


def as_tenant(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    file.chmod(0o600)
    return file


def test_a_request_counts_by_its_prompts_and_choices(keys):
    with serving(api_key_file=keys, max_concurrent_per_key=8) as server:
        for path, body in (
            ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 3}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 9}),
        ):
            reply = server.post(path, body | {"max_tokens": 1}, **as_tenant("anna"))
            assert (reply.status, reply.error["code"]) == (400, "too_many_sequences")
            assert "9 sequences" in reply.error["message"] and "8" in reply.error["message"]
            body["n"] = 2
            assert server.post(path, body | {"max_tokens": 1}, **as_tenant("anna")).status == 200
        server.wait_until_idle()
