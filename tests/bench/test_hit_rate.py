"""The hit-rate benchmark from its command line: results and their JSON, what is refused, what an interrupt leaves."""

import json
import random

import pytest

from bench import hit_rate, hit_rate_job
from bench.references import REFERENCES, References
from kvstore.errors import ConfigError
from kvstore.planning.trace_formats import read_trace


@pytest.fixture
def trace(tmp_path):
    """A small Mooncake trace: eight conversations behind one head."""
    rng, path = random.Random(1), tmp_path / "small.jsonl"
    talks, lines = [[0] for _ in range(8)], []
    for number in range(200):
        talk = rng.choice(talks)
        talk.append(number + 1)
        num_tokens = len(talk) * 512 - rng.randrange(512)
        line = {"timestamp": number * 900, "input_length": num_tokens, "output_length": 100, "hash_ids": talk}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def bench(capsys):
    """Runs the command line in this process: its exit code, its table and what else it says."""

    def command(*flags):
        try:
            code = hit_rate.main(list(map(str, flags)))
        except SystemExit as left:
            code = left.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def of_file(trace):
    return "--trace", trace, "--format", "mooncake"


def test_references_of_one_tier(bench, trace, tmp_path):
    file = tmp_path / "out.json"
    flags = ("--policies", "fifo,lru,lfu,s3fifo,belady", "--capacity-blocks", "20,60", "--json", file)
    code, table, _ = bench(*of_file(trace), *flags)
    found = json.loads(file.read_text())
    assert code == 0 and set(found) == {"machine", "command", "results"}
    assert "bench.hit_rate" in found["command"] and "torch" not in found["machine"]
    *rows, ideal = found["results"]
    expected = [(policy, capacity) for capacity in (20, 60) for policy in REFERENCES]
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == expected
    references = References(read_trace(trace, "mooncake"))
    for row in rows:
        hits = references.replay(row["policy"], row["capacity_blocks"])
        assert (row["token_hit_rate"], row["block_hit_rate"]) == (hits.token_hit_rate, hits.block_hit_rate)
        assert row["hits_at_arrival"] == row["hits_at_schedule"] == {"hbm": hits.num_hit_tokens, "cpu": 0, "disk": 0}
        assert row["token_hit_rate"] <= ideal["token_hit_rate"]
    assert (ideal["policy"], ideal["capacity_blocks"]) == ("ideal", 201)
    assert "small.jsonl: 200 requests, blocks of 512 tokens" in " ".join(table.split())
    assert f"{ideal['token_hit_rate']:.4f}" in table and "belady" in table


def test_the_first_requests_of_a_file_and_a_warm_up(bench, trace, tmp_path):
    rows = {}
    for name, flags in {"all": (), "first": ("--requests", 50), "later": ("--warm-up", 150)}.items():
        file = tmp_path / f"{name}.json"
        code, _, _ = bench(*of_file(trace), "--policies", "lru", "--capacity-blocks", 9, "--json", file, *flags)
        assert code == 0
        rows[name] = json.loads(file.read_text())["results"][0]
    assert rows["first"]["num_blocks"] < rows["all"]["num_blocks"]
    assert 0 < rows["later"]["num_blocks"] < rows["all"]["num_blocks"] - rows["first"]["num_blocks"]


# -- tiers -----------------------------------------------------------------------------------------------------------
def test_tiers_are_replayed_with_what_the_flags_say(bench, trace, tmp_path):
    file = tmp_path / "out.json"
    sizes = ("--hbm", "40k", "--cpu", "20k", "--disk", "40k,4M", "--policies", "lru,look-ahead,auto,belady")
    service = ("--prefill-rate", "9e3", "--batch", "24", "--read-bandwidth", "3GB", "--ttl", "1h", "--warm-up", "7")
    assert bench(*of_file(trace), *sizes, *service, "--kv-bytes-per-token", "1000", "--json", file)[0] == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["policy"] for row in rows] == ["lru", "look-ahead", "auto", "belady"] * 2
    assert [(row["hbm_blocks"], row["cpu_blocks"], row["disk_blocks"]) for row in rows[::4]] == [
        (78, 39, 78),
        (78, 39, 7812),
    ]
    assert all(row["num_requests"] == 193 and row["ttft_p90_s"] > 0 for row in rows)
    assert rows[0]["token_hit_rate"] < rows[4]["token_hit_rate"]


# -- what is refused, and interrupts ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policies", "lru,mru"), "unknown policy 'mru' in one tier; one tier: fifo, lru, lfu, s3fifo, belady,"),
        (("--policies", "lfu", "--hbm", "1M"), "unknown policy 'lfu' in tiers"),
        (("--capacity-blocks", "0"), "'0' is not a whole number from 1 on"),
        (("--hbm", "lots"), "'lots' is no capacity; give tokens such as 40k or 3M, or bytes such as 128GB"),
        (("--hbm", "1GB"), "needs --kv-bytes-per-token"),
        (("--hbm", "1M", "--capacity-blocks", "5"), "give one kind"),
        (("--hbm", "1M,2M", "--cpu", "1M,2M,3M"), "one size or all of them 3"),
        (("--ttl", "1h"), "--ttl has no effect on one tier without time"),
        (("--warm-up", "10", "--policies", "lru,auto"), "--warm-up has no effect on return and auto in one tier"),
        (("--json", "nowhere/at/all.json"), "there is no directory nowhere/at"),
        (("--trace", "absent.jsonl"), "the trace absent.jsonl cannot be read"),
        (("--format", "bailian"), "small.jsonl, line 1: Object missing required field `chat_id`"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(bench, trace, flags, message):
    code, table, said = bench(*of_file(trace), *flags)
    assert (code, table) == (2, "") and message in said
    assert said.count("\n") == 1 and said.startswith("python -m bench.hit_rate: ")


def test_a_file_and_its_format_come_together(bench, trace):
    assert "needs --format" in bench("--trace", trace)[2]
    assert "give --trace FILE" in bench("--format", "turns")[2]
    assert "no effect on made-up traffic" in bench("--conversations", 5)[2]


def test_an_interrupt_leaves_what_is_done(bench, trace, tmp_path, monkeypatch):
    replay, file = References.replay, tmp_path / "out.json"

    def interrupted(self, policy, *rest):
        if policy == "lfu":
            raise KeyboardInterrupt
        return replay(self, policy, *rest)

    monkeypatch.setattr(References, "replay", interrupted)
    flags = ("--policies", "fifo,lfu,lru", "--capacity-blocks", "20", "--json", file)
    code, table, said = bench(*of_file(trace), *flags)
    assert code == 130 and "not complete" in said and "fifo" in table
    assert [row["policy"] for row in json.loads(file.read_text())["results"]] == ["fifo"]


# -- values of flags -------------------------------------------------------------------------------------------------
def parsed(*flags):
    return hit_rate_job.parse("", list(flags))


def test_capacities_are_tokens_or_bytes():
    sizes = parsed("--hbm", "40k", "--cpu", "3M,1.5G", "--disk", "128GB,2TiB")
    assert [(size.amount, size.is_bytes) for size in sizes.hbm + sizes.cpu] == [
        (40_000, False),
        (3_000_000, False),
        (1_500_000_000, False),
    ]
    assert [(size.amount, size.is_bytes) for size in sizes.disk] == [(128 * 10**9, True), (2 * 2**40, True)]
    assert hit_rate_job._in_blocks(sizes.disk[0], 819_200, 64) == 128 * 10**9 // (819_200 * 64)
    assert hit_rate_job._in_blocks(sizes.hbm[0], None, 64) == 625
    with pytest.raises(ConfigError):
        hit_rate_job._in_blocks(sizes.disk[0], None, 64)
    assert parsed("--kv-bytes-per-token", "LLaMA-13B").kv_bytes_per_token == 819_200
    assert parsed("--ttl", "1.5h").ttl == 5400 and parsed("--read-bandwidth", "3GB").read_bandwidth == 3e9


@pytest.mark.parametrize("name", hit_rate_job.PRESETS)
def test_a_preset_stands_beneath_the_flags_that_are_given(name):
    found = parsed("--preset", name, "--batch", "3")
    assert found.batch == 3 and found.format == "turns" and found.warm_up == 10_000
    assert found.kv_bytes_per_token == 819_200 and found.policies[0] == "fifo"
