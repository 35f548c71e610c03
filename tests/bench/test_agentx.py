"""Agents' sessions are made smaller without changing what is equal in them, and the report is of what was replayed."""

import json

import pytest

from bench import agentx
from bench.agentx import BLOCK_TOKENS, Scale, from_increments, scale_for, scaled, summed_up
from bench.peers.load import PeerError
from tests.bench import aiperf_standin


def request(tokens, hash_ids, out=100):
    return {"t": 0.0, "type": "s", "model": "m", "in": tokens, "out": out, "hash_ids": hash_ids}


def trace(*requests, block_size=64, **more):
    return {"id": "t", "models": [], "block_size": block_size, "requests": list(requests), **more}


def test_rows_that_add_tokens_become_requests_that_have_them_all():
    rows = [("a", 1100), ("b", 600), ("a", 500)]
    made = from_increments(
        {"session_id": name, "input_length": tokens, "output_length": 7} for name, tokens in rows
    )  # fmt: skip
    assert [one["id"] for one in made] == ["a", "b"]
    assert [(one["in"], one["out"], one["hash_ids"]) for one in made[0]["requests"]] == [
        (1100, 7, [0, 1]), (1600, 7, [0, 1, 2])
    ]  # fmt: skip


def test_a_smaller_trace_has_equal_blocks_where_it_had_them():
    shared, other = list(range(10)), [*range(6), 70, 71, 72, 73]
    inner = {"type": "subagent", "t": 1.0, "requests": [request(640, shared)], "tool_tokens": 300, "system_tokens": 9}
    small = scaled(trace(request(700, [*shared, 10]), request(640, other), inner, system_tokens=600), Scale(3, 64))
    first, second, sub = small["requests"]
    assert first["hash_ids"] == [0, 1, 2] and second["hash_ids"] == [0, 1, 3]
    assert first["in"] == 3 * BLOCK_TOKENS and first["out"] == 33
    assert sub["requests"][0]["hash_ids"] == [0, 1, 2]
    assert (small["system_tokens"], sub["tool_tokens"], sub["system_tokens"]) == (200, 100, 3)
    assert small["block_size"] == BLOCK_TOKENS


def test_the_longest_prompt_and_its_answer_fit():
    long = trace(request(90_000, list(range(175)), out=2_000), block_size=512)
    scale = scale_for([long, trace(request(9_000, list(range(17))), block_size=512)], 4096)
    [small] = scaled(long, scale)["requests"]
    assert 0.7 * 4096 < small["in"] + small["out"] < 4096


def test_traces_that_fit_stay_as_they_are():
    fits = trace(request(128, [0, 1], out=3), tool_tokens=0, system_tokens=0)
    assert scaled(fits, scale_for([fits], 4096)) == fits


def test_blocks_of_two_sizes_are_refused():
    with pytest.raises(PeerError, match=r"blocks of \[64, 512\] tokens"):
        scale_for([trace(request(64, [0])), trace(request(512, [0]), block_size=512)], 4096)


def record(session, start_s, end_s, *, read=None, error=None):
    times = {"x_correlation_id": session, "request_start_ns": start_s * 10**9, "request_end_ns": end_s * 10**9}
    metrics = {"usage_prompt_tokens": {"value": 100}, "time_to_first_token": {"value": 250.0}}
    if read is not None:
        metrics["usage_prompt_cache_read_tokens"] = {"value": read}
    return {"metadata": times, "metrics": {} if error else metrics, "error": error}


def test_sessions_end_with_their_last_answer_and_failures_are_counted():
    records = [record("a", 1, 2), record("a", 5, 9, read=80), record("b", 2, 4, read=10), record("b", 4, 6, error="x")]
    found = summed_up({"theoretical_prefix_cache_hit": {"avg": 62.5}}, records)
    assert (found.theoretical, found.prompt_tokens, found.cached_tokens) == (0.625, 300, 90)
    assert found.session_s == [8, 4] and found.ttft_s == [0.25] * 3 and found.num_failed == 1


def test_every_printable_character_is_a_token():
    tokenizer = agentx.character_tokenizer()
    text = 'if (x < 1) {\n  return "~";\n}'
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    said = [{"role": "user", "content": text}]
    assert len(tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]) == len(text) + 3
    assert all(tokenizer.decode([token], skip_special_tokens=True) for token in range(len(tokenizer)))


def test_sessions_are_replayed_warm_and_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_LOAD", "always")  # whatever a busy machine makes of the rates
    found = tmp_path / "found.json"
    flags = ["--aiperf", aiperf_standin.install(tmp_path), "--model", "tiny", "--logs", tmp_path / "logs",
             "--json", found, "--threads", 1]  # fmt: skip
    assert agentx.main([*map(str, flags), "--arms", "kvstore,lmcache"]) == 0
    rows = {(row["arm"], row["replay"]): row for row in json.loads(found.read_text())["results"]}
    assert ("vLLM + LMCache", "absent: no --peer-python") in rows
    first, again, after = (rows["kvstore", state] for state in ("first", "again", "after kill -9"))
    assert first["failed"] == again["failed"] == after["failed"] == 0
    assert 0 < first["read"] <= first["theoretical"] < 1
    assert first["read"] < after["read"] <= again["read"] and after["read"] > 0.95


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--aiperf", "/no/aiperf"], "--aiperf /no/aiperf is not there"),
        (["--arms", "vllm"], "--arms 'vllm' is without kvstore"),
        (["--arms", "kvstore,sglang"], "--arms 'sglang'; known: kvstore, vllm"),
        (["--aiperf", "STANDIN", "--traces", "EMPTY"], "has no .json file"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_one_line(flags, said, tmp_path, refused):
    (tmp_path / "none").mkdir()
    places = {"STANDIN": aiperf_standin.install(tmp_path), "EMPTY": tmp_path / "none"}
    assert said in refused(agentx.main, *(places.get(one, one) for one in flags))
