"""The hit-rate benchmark from its command line: results and their JSON, what is refused, what an interrupt leaves."""

import json
import random
import sys
from dataclasses import dataclass, field, replace

import pytest

from bench import hit_rate, hit_rate_job
from bench.references import REFERENCES, Hits, References
from kvstore.errors import ConfigError
from kvstore.planning.replay_config import ReplayConfig, ServiceModel
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
def bench(monkeypatch, capsys):
    """Runs the command line in this process: its exit code, its table and what else it says."""

    def command(*flags):
        monkeypatch.setattr(sys, "argv", ["hit_rate.py", *map(str, flags)])
        try:
            code = hit_rate.main()
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


def test_made_up_traffic_and_capacities_of_its_own(bench, tmp_path):
    file = tmp_path / "out.json"
    flags = ("--kind", "people", "--requests", 300, "--policies", "lru", "--seed", 5, "--block-size", 64)
    code, table, _ = bench(*flags, "--json", file)
    assert code == 0 and "people, seed 5: 300 requests" in " ".join(table.split())
    rows = json.loads(file.read_text())["results"]
    assert [row["policy"] for row in rows] == ["lru"] * 3 + ["ideal"]
    sizes = [row["capacity_blocks"] for row in rows]
    assert sizes == sorted(sizes) and all(isinstance(size, int) for size in sizes)
    assert rows[0]["token_hit_rate"] <= rows[-1]["token_hit_rate"]


def test_the_first_requests_of_a_file_and_a_warm_up(bench, trace, tmp_path):
    rows = {}
    for name, flags in {"all": (), "first": ("--requests", 50), "later": ("--warm-up", 150)}.items():
        file = tmp_path / f"{name}.json"
        code, _, _ = bench(*of_file(trace), "--policies", "lru", "--capacity-blocks", 9, "--json", file, *flags)
        assert code == 0
        rows[name] = json.loads(file.read_text())["results"][0]
    assert rows["first"]["num_blocks"] < rows["all"]["num_blocks"]
    assert 0 < rows["later"]["num_blocks"] < rows["all"]["num_blocks"] - rows["first"]["num_blocks"]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_plot(bench, trace, tmp_path, kind):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{kind}"
    flags = ("--policies", "fifo,lru", "--capacity-blocks", "5,20", "--plot", file)
    assert bench(*of_file(trace), *flags)[0] == 0
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


# -- our own policies, behind a stand-in of the replay ---------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    num_prompt_tokens: int = 1000
    num_hit_tokens: int = 500
    hits_at_arrival: dict = field(default_factory=lambda: {"hbm": 100, "cpu": 150, "disk": 250})
    hits_at_schedule: dict = field(default_factory=lambda: {"hbm": 100, "cpu": 399, "disk": 1})
    bytes_moved: dict = field(default_factory=lambda: {"save": 1, "load": 2, "write": 3, "read": 4 * 10**9})
    ttft_mean_s: float = 0.25
    ttft_p90_s: float = 0.5
    token_hit_rate = 0.5
    block_hit_rate = 0.25


@pytest.fixture
def replayed(monkeypatch):
    """What the stand-in was asked for."""
    asked = []

    def replay(trace, config, progress, steering):
        asked.append(config if steering is None else replace(config, policy=steering.func.__name__))
        progress(len(trace.requests))
        return Result()

    def replay_one_tier(trace, capacity_blocks, policy, progress):
        asked.append((policy, capacity_blocks))
        return Hits(1000, 250, 1000, 500)

    monkeypatch.setattr("kvstore.planning.replay.replay", replay)
    monkeypatch.setattr("bench.one_tier.replay_one_tier", replay_one_tier)
    monkeypatch.setattr(ReplayConfig, "__post_init__", lambda _: None)  # else it knows the store's own policies only
    return asked


def test_tiers_are_replayed_with_what_the_flags_say(bench, trace, tmp_path, replayed):
    file = tmp_path / "out.json"
    sizes = ("--hbm", "40k", "--cpu", "1GB", "--disk", "10GB,20GB", "--kv-bytes-per-token", "1000")
    service = ("--prefill-rate", "9e3", "--batch", "24", "--read-bandwidth", "3GB", "--ttl", "1h", "--warm-up", "7")
    code, table, _ = bench(*of_file(trace), *sizes, *service, "--json", file)
    assert code == 0
    expected = [("fifo", False), ("lru", False), ("lru", True), ("return", True), ("auto", True)] * 2
    assert [(config.policy, config.look_ahead) for config in replayed] == expected
    assert {(config.hbm_blocks, config.cpu_blocks) for config in replayed} == {(78, 1953)}
    assert [config.disk_blocks for config in replayed] == [19531] * 5 + [39062] * 5
    service = ServiceModel(prefill_tokens_per_s=9e3, max_batch=24, read_bytes_per_s=3e9)
    assert {(c.service, c.ttl_s, c.warm_up, c.block_bytes) for c in replayed} == {(service, 3600.0, 7, 512_000)}
    rows = json.loads(file.read_text())["results"]
    assert [row["policy"] for row in rows[:5]] == ["fifo", "lru", "look-ahead", "return", "auto"]
    assert (rows[0]["hbm_blocks"], rows[0]["disk_blocks"], rows[9]["disk_blocks"]) == (78, 19531, 39062)
    assert rows[0]["hits_at_schedule"] == {"hbm": 100, "cpu": 399, "disk": 1} and rows[0]["ttft_p90_s"] == 0.5
    assert rows[0]["bytes_moved"]["read"] == 4 * 10**9 and rows[0]["block_hit_rate"] == 0.25
    shown = " ".join(table.split())
    assert "20.0/30.0/50.0" in shown and "20.0/79.8/0.2" in shown and "1/2/3/4G" in shown


def test_without_look_ahead_nobody_looks_ahead_but_who_is_named_so(bench, trace, replayed):
    flags = ("--hbm", "40k", "--policies", "auto,belady,look-ahead", "--no-look-ahead")
    assert bench(*of_file(trace), *flags)[0] == 0
    assert [(config.policy, config.look_ahead) for config in replayed] == [
        ("auto", False),
        ("Oracle", False),
        ("lru", True),
    ]


def test_our_policies_stand_beside_the_references_of_one_tier(bench, trace, tmp_path, replayed):
    file = tmp_path / "out.json"
    flags = ("--policies", "auto,lru,return", "--capacity-blocks", "7", "--json", file)
    assert bench(*of_file(trace), *flags)[0] == 0
    assert replayed == [("auto", 7), ("return", 7)]
    rows = json.loads(file.read_text())["results"]
    assert [(row["policy"], row["capacity_blocks"]) for row in rows][:3] == [("auto", 7), ("lru", 7), ("return", 7)]
    assert rows[0]["token_hit_rate"] == 0.5 and rows[0]["hits_at_arrival"]["hbm"] == 500


# -- what is refused, and interrupts ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policies", "lru,mru"), "unknown policy 'mru' in one tier; one tier: fifo, lru, lfu, s3fifo, belady,"),
        (("--policies", "lfu", "--hbm", "1M"), "unknown policy 'lfu' in tiers"),
        (("--capacity-blocks", "0"), "'0' is not a whole number from 1 on"),
        (("--capacity-blocks", "10,many"), "'many' is not a whole number from 1 on"),
        (("--capacity-blocks", "-5"), "--capacity-blocks"),
        (("--hbm", "lots"), "'lots' is no capacity; give tokens such as 40k or 3M, or bytes such as 128GB"),
        (("--hbm", "0"), "--hbm holds less than one block"),
        (("--hbm", "1GB"), "needs --kv-bytes-per-token"),
        (("--hbm", "1M", "--capacity-blocks", "5"), "give one kind"),
        (("--hbm", "1M,2M", "--cpu", "1M,2M,3M"), "one size or all of them 3"),
        (("--cpu", "1M"), "need --hbm"),
        (("--kv-bytes-per-token", "gpt-5"), "'gpt-5' is neither a number nor one of llama-13b,"),
        (("--ttl", "1h"), "--ttl has no effect on one tier without time"),
        (("--arrival-rate", "2"), "--arrival-rate has no effect on traces of the format mooncake"),
        (("--batch", "0"), "'0' is not a whole number from 1 on"),
        (("--ttl", "soon"), "'soon' is not a number above 0"),
        (("--load-bandwidth", "fast"), "bandwidth is 'fast'"),
        (("--warm-up", "200", "--policies", "lru"), "leaves none of the 200 requests"),
        (("--warm-up", "10", "--policies", "lru,auto"), "--warm-up has no effect on return and auto in one tier"),
        (("--json", "nowhere/at/all.json"), "there is no directory nowhere/at"),
        (("--json", "."), ". cannot be written: it is a directory"),
        (("--policies", ","), "no name is given"),
        (("--plot", "plot.pdf"), "neither .png nor .svg"),
        (("--format", "csv"), "unknown trace format 'csv'; known are mooncake, sessions, turns, bailian"),
        (("--trace", "absent.jsonl"), "the trace absent.jsonl cannot be read"),
        (("--format", "bailian"), "small.jsonl, line 1: the field 'chat_id' is missing"),
        (("--kind", "people"), "--kind people has no effect on a trace"),
        (("--surprise",), "--surprise"),
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


def test_a_broken_line_of_a_trace_is_named(bench, trace):
    trace.write_text(trace.read_text() + "{\n")
    code, _, said = bench(*of_file(trace), "--policies", "lru")
    assert code == 2 and "small.jsonl, line 201: not JSON" in said and said.count("\n") == 1


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


def test_an_interrupt_while_the_trace_is_read(bench, trace, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hit_rate_job, "read_trace", interrupted)
    assert bench(*of_file(trace))[0] == 130


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(hit_rate, "PROGRESS_EVERY_S", 0.0)
    with hit_rate.progress("lru", 5000) as told:
        told(2000)
    assert capsys.readouterr().err == "  lru: 2,000 of 5,000 requests\n"


def test_large_numbers_are_short_in_the_table():
    numbers = (0, 7, 999, 999.6, 1000, 95_367, 1_999_999, 128 * 10**9, 7_744 * 10**9, 5e16)
    shown = ["0", "7", "999", "1k", "1k", "95.4k", "2M", "128G", "7.74T", "5e+04T"]
    assert [hit_rate._short(number) for number in numbers] == shown


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
