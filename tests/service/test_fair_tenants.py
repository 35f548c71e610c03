"""Two tenants on one server: a request of very many sequences beside a small one of somebody else, over HTTP."""

import json
from concurrent.futures import ThreadPoolExecutor

from tests.support.by_hand import held
from tests.support.service.serving import raw_request, serving
from tests.support.service.talking import tenants


def test_a_request_counts_by_its_prompts_and_choices():
    with serving(max_queue=1) as server, ThreadPoolExecutor(1) as client:
        body = {"prompt": ["a"] * 11, "n": 3, "max_tokens": 1}
        reply = server.post("/v1/completions", body)
        assert (reply.status, reply.error["code"]) == (400, "too_many_sequences")
        assert "33 sequences" in reply.error["message"] and "32" in reply.error["message"]
        assert server.post("/v1/completions", body | {"n": 2}).status == 200
        server.wait_until_idle()
        body = {"messages": [{"role": "user", "content": "a"}], "n": 9, "max_tokens": 1}
        with held(server.engine):
            reply = client.submit(server.post, "/v1/chat/completions", body)
            server.wait_until(lambda: server.context.limits.num_sequences == 9, "they are counted")
        assert reply.result().status == 200
        server.wait_until_idle()


def test_another_tenant_is_answered_beside_a_request_of_256_prompts_with_16_choices(tmp_path):
    """It ended before only because all of the first tenant's sequences had."""
    flood = {"prompt": [f"{i} is" for i in range(256)], "n": 16, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with tenants(tmp_path, engine={"max_num_seqs": 16}) as (alice, server), server.connect() as raw:
        sent = {"Authorization": f"Bearer {alice.key}", "Content_Type": "application/json"}
        raw.sendall(raw_request("POST", "/v1/completions", json.dumps(flood).encode(), **sent))
        scheduler = server.engine.loop.scheduler
        server.wait_until(lambda: scheduler.num_running == 16 and scheduler.num_waiting > 200, "all places are taken")
        small = {"prompt": "tea", "max_tokens": 3, "ignore_eos": True}
        reply = server.post("/v1/completions", small)
        assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 3
        assert scheduler.num_waiting > 200, "the first tenant's are far from their end"
        raw.close()
        server.wait_until_idle()
