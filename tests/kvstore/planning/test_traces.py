"""Traces: made-up ones, conversations that become requests, and every format with what may be wrong in its files."""

import json
import math
import random

import pytest

from bench.references import prompt_blocks
from kvstore.errors import ConfigError
from kvstore.planning.replay import Replay
from kvstore.planning.replay_config import ReplayConfig
from kvstore.planning.trace_formats import read_trace
from kvstore.planning.traces import CHAIN_STRIDE, Arrivals, CommonPrefix, TraceTurn, TurnsToRequests, chain_names


def written(tmp_path, *lines):
    """A file of lines; what is no text becomes JSON."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def mooncake(names, num_tokens, timestamp=0, **more):
    return {"timestamp": timestamp, "input_length": num_tokens, "output_length": 7, "hash_ids": names} | more


def shown(trace):
    return [(list(r.chain), r.partial, r.num_tokens, r.num_output_tokens, r.arrival_s) for r in trace.requests]


def numbered(chains):
    """The same names as numbers, in the order in which they come."""
    numbers = {}
    return [[numbers.setdefault(name, len(numbers)) for name in chain] for chain in chains]


# -- mooncake --------------------------------------------------------------------------------------------------------
def test_mooncake_knows_full_and_partial_blocks(tmp_path):
    trace = read_trace(written(tmp_path, mooncake([0, 1, 2], 1100), "", mooncake([0, 3], 1024, 1500)), "mooncake")
    assert (trace.name, trace.block_size, trace.notes) == ("trace.jsonl", 512, ())
    assert [told[1:] for told in shown(trace)] == [(trace.requests[0].partial, 1100, 7, 0.0), (None, 1024, 7, 1.5)]
    assert numbered(prompt_blocks(r, 512) for r in trace.requests) == [[0, 1, 2], [0, 3]]
    assert [(r.after, r.has_answer) for r in trace.requests] == [(-1, False)] * 2


def test_a_trace_may_name_fewer_blocks_than_its_prompt_has(tmp_path):
    trace = read_trace(written(tmp_path, mooncake([0], 1100), mooncake([0, 1], 1100)), "mooncake")
    assert numbered(r.chain for r in trace.requests) == [[0], [0, 1]]
    assert [r.partial for r in trace.requests] == [None, None]


def test_one_block_too_many_is_left_out_and_told(tmp_path):
    trace = read_trace(written(tmp_path, mooncake([0, 1, 2], 1024), mooncake([0, 1, 2], 1000)), "mooncake")
    assert numbered((*r.chain, r.partial or 0) for r in trace.requests) == [[0, 1, 2], [0, 1]]
    assert trace.notes == ("requests that name one block more than their prompt holds, which is ignored: 2",)


def test_names_need_not_be_small_but_must_be_64_bits(tmp_path):
    names = [-(2**63), 2**63 - 1]
    assert len(set(read_trace(written(tmp_path, mooncake(names, 1024)), "mooncake").requests[0].chain)) == 2
    with pytest.raises(ConfigError, match="9223372036854775807"):
        read_trace(written(tmp_path, mooncake([2**63], 512)), "mooncake")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not JSON \(Expecting property name .* at column 2\)"),
        (json.dumps(mooncake([0], 512, timestamp=float("nan"))), "line 2: Expected `float`, got `null`"),
        ("[" * 100_000, "line 2: Expected `object`"),
        ({"timestamp": 1}, "line 2: Object missing required field `output_length`"),
        (mooncake([1.5], 512), r"line 2: Expected `int`, got `float` - at `\$.hash_ids\[0\]`"),
        (mooncake([1], 0), r"line 2: Expected `int` >= 1 - at `\$.input_length`"),
        (mooncake([1], 512, output_length=-1), r"line 2: Expected `int` >= 0 - at `\$.output_length`"),
        (mooncake([1], 512, timestamp="soon"), r"line 2: Expected `float`, got `str` - at `\$.timestamp`"),
        (mooncake([1, 2, 3], 20), "line 2: 3 hash_ids, but 20 tokens are 1 blocks of 512 tokens; is this the right"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_trace(written(tmp_path, mooncake([0], 512), line), "mooncake")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_what_only_the_standard_library_reads_is_read_too(tmp_path, name):
    said = {"conversations": [{"from": "human", "value": "cut \ud83d"}, {"from": "gpt", "value": "yes"}], "x": math.nan}
    (tmp_path / name).write_text(json.dumps([said, said] if name == "a.json" else said))
    assert len(read_trace(tmp_path / name, "turns").requests) == (2 if name == "a.json" else 1)


def test_a_broken_array_is_named_with_its_line(tmp_path):
    (tmp_path / "a.json").write_text('[{"id": 1},\n {"id": 2, "turns": [\n')
    with pytest.raises(ConfigError, match=r"a.json, line \d: not JSON \(.* at column \d+\)"):
        read_trace(tmp_path / "a.json", "turns")


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="known are mooncake, sessions, turns, bailian"):
        read_trace(tmp_path / "x", "parquet")
    with pytest.raises(ConfigError, match=r"the trace .*absent cannot be read: No such file"):
        read_trace(tmp_path / "absent", "mooncake")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path, "turns")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(written(tmp_path), "mooncake")
    with pytest.raises(ConfigError, match="a block of 0 tokens"):
        read_trace(written(tmp_path), "mooncake", block_size=0)
    (tmp_path / "binary").write_bytes(b"\x80\x81\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_trace(tmp_path / "binary", "mooncake")


# -- bailian ---------------------------------------------------------------------------------------------------------
def bailian(names, num_tokens, timestamp=0.0, **more):
    line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": timestamp, "input_length": num_tokens, "output_length": 2}
    return line | {"type": "text", "turn": 1, "hash_ids": names} | more


@pytest.mark.parametrize(("trace_format", "line"), [("bailian", bailian), ("mooncake", mooncake)])
def test_names_are_joined_with_what_stands_before(tmp_path, trace_format, line):
    lines = [line([5, 6, 5], 40, 250), line([5, 6], 32, 61_125), line([6, 5], 32, 62_000)]
    trace = read_trace(written(tmp_path, *lines), trace_format, block_size=16)
    first, second, third = trace.requests
    assert second.arrival_s == (61_125 if trace_format == "bailian" else 61.125)
    assert list(first.chain) == list(second.chain) and first.partial is not None
    names = [*prompt_blocks(first, 16), *prompt_blocks(third, 16)]
    assert len(set(names)) == len(names), "equal tokens behind other histories are other blocks"


@pytest.mark.parametrize("seed", range(4))
def test_names_that_stand_for_their_own_tokens_alone_can_be_replayed(tmp_path, seed):
    rng = random.Random(seed)
    chains = [[rng.randint(1, 8) for _ in range(rng.randint(1, 6))] for _ in range(40)]
    lines = [mooncake(names, 512 * len(names), 300 * number) for number, names in enumerate(chains)]
    run = Replay(read_trace(written(tmp_path, *lines), "mooncake"), ReplayConfig(12, 14, 20, 1000))
    assert run.run().num_requests == 40
    run.check_integrity()


def test_bailian_is_told_from_mooncake(tmp_path):
    with pytest.raises(ConfigError, match="missing required field `chat_id`"):
        read_trace(written(tmp_path, mooncake([0], 512)), "bailian")
    with pytest.raises(ConfigError, match="right format and block size"):
        read_trace(written(tmp_path, bailian([1, 2, 3, 4], 64)), "mooncake")
    assert read_trace(written(tmp_path, bailian([1, 2], 1024)), "bailian", block_size=512).block_size == 512


@pytest.mark.parametrize("trace_format", ["mooncake", "sessions"])
def test_a_trace_may_say_which_answers_call_a_tool(tmp_path, trace_format):
    lines = [
        mooncake([1, 2], 1024, session="a", calls_tool=True),
        mooncake([1, 2], 1024, 1, session="b", calls_tool=False),
        mooncake([1, 2], 1024, 2, session="c"),
    ]
    trace = read_trace(written(tmp_path, *lines), trace_format)
    assert [request.calls_tool for request in trace.requests] == [True, False, False]


# -- sessions --------------------------------------------------------------------------------------------------------
def turn(session, timestamp, num_output=10, **more):
    return {"session": session, "timestamp": timestamp, "output_length": num_output} | more


def test_sessions_grow_and_start_anew_when_they_were_cut(tmp_path):
    lines = [
        turn("a", 0, input_length=30),
        turn(7, 1, new_tokens=50),
        turn("a", 2.5, input_length=60),  # 40 were there
        turn(7, 3, new_tokens=5),  # behind 60
        turn("a", 4, input_length=50),  # 70 were there: cut
        turn("a", 5, new_tokens=10),
    ]
    trace = read_trace(written(tmp_path, *lines), "sessions", block_size=10)
    assert [r.num_tokens for r in trace.requests] == [30, 50, 60, 65, 50, 70]
    assert [len(r.chain) for r in trace.requests] == [4, 6, 7, 7, 6, 8]
    assert [r.chain[0] // CHAIN_STRIDE for r in trace.requests] == [1, 2, 1, 2, 3, 3]
    assert [len(prompt_blocks(r, 10)) for r in trace.requests] == [3, 5, 6, 6, 5, 7]
    assert all(r.has_answer and r.after == -1 and r.partial is None for r in trace.requests)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (turn("a", 0, new_tokens=1), "goes back in time, from 5.0 to 0.0 s"),
        (turn("a", 6), "either 'input_length'"),
        (turn("a", 6, new_tokens=0), r"Expected `int` >= 1 - at `\$.new_tokens`"),
        (turn(1.5, 6, new_tokens=1), r"got `float` - at `\$.session`"),
        (turn("a", 6, new_tokens=1, calls_tool=1), r"Expected `bool`, got `int` - at `\$.calls_tool`"),
    ],
)
def test_a_broken_turn_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_trace(written(tmp_path, turn("a", 5, new_tokens=3), line), "sessions")
    assert "line 2" in str(caught.value)


# -- turns -----------------------------------------------------------------------------------------------------------
def talk(*turns):
    return {"id": "x", "turns": [[role, tokens * 4, tokens, tokens] for role, tokens in turns]}


def conversations(trace):
    """(prompt, answer) of every turn, by conversation, in the order in which these begin."""
    found = {}
    for index, request in enumerate(trace.requests):
        lead = found[request.after][0] if request.after >= 0 else index
        found[index] = (lead, (request.num_tokens, request.num_output_tokens))
    leads = sorted({lead for lead, _ in found.values()})
    return [[pair for lead, pair in found.values() if lead == first] for first in leads]


def test_turns_are_prompts_with_their_history(tmp_path):
    talks = [talk(("a", 100), ("u", 10), ("a", 20), ("x", 3), ("u", 2), ("a", 30), ("a", 5), ("u", 9))]
    (tmp_path / "talks.json").write_text(json.dumps(talks, indent=1))
    trace = read_trace(tmp_path / "talks.json", "turns", block_size=10)
    assert conversations(trace) == [[(110, 20), (135, 35)]]
    assert [list(r.chain) for r in trace.requests] == [list(chain_names(1, 13)), list(chain_names(1, 17))]
    assert trace.requests[0].arrival_s == 0 and trace.requests[1].after == 0 and trace.requests[1].arrival_s > 0


def test_sharegpt_itself_is_read_with_a_quarter_of_the_characters(tmp_path):
    said = [("system", "abcd"), ("human", "Hello"), ("gpt", "Hi"), ("human", "?"), ("chatgpt", "x" * 400)]
    line = {"id": "1", "conversations": [{"from": role, "value": text} for role, text in said]}
    trace = read_trace(written(tmp_path, line, line), "turns")
    assert conversations(trace) == [[(3, 1), (5, 100)]] * 2


def test_conversations_are_drawn_as_often_as_is_asked(tmp_path):
    path = written(tmp_path, *[talk(("u", size), ("a", size)) for size in (1, 2, 3)])
    for number in (2, 3, 50):
        trace = read_trace(path, "turns", arrivals=Arrivals(num_conversations=number, seed=4))
        assert len(trace.requests) == number
        if number <= 3:
            assert len({r.num_tokens for r in trace.requests}) == number, "none twice"
    assert sorted(r.num_tokens for r in read_trace(path, "turns").requests) == [1, 2, 3]


def test_the_seed_decides_and_the_rates_hold(tmp_path):
    path = written(tmp_path, talk(("u", 5), ("a", 5), ("u", 5), ("a", 5)))
    arrivals = Arrivals(rate_per_s=2.0, think_median_s=30.0, num_conversations=4000, seed=1)
    trace = read_trace(path, "turns", arrivals=arrivals)
    assert shown(trace) == shown(read_trace(path, "turns", arrivals=arrivals))
    assert shown(trace) != shown(read_trace(path, "turns", arrivals=Arrivals(2.0, 30.0, 1.0, 4000, seed=2)))
    starts = [r.arrival_s for r in trace.requests if r.after < 0]
    thoughts = sorted(r.arrival_s for r in trace.requests if r.after >= 0)
    assert starts == sorted(starts) and len(starts) / starts[-1] == pytest.approx(2.0, rel=0.1)
    assert thoughts[2000] == pytest.approx(30.0, rel=0.1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": 1}, "expected is 'turns' or 'conversations'"),
        ({"turns": 3}, r"got `int` - at `\$.turns`"),
        ({"turns": [["u", 1, 1]]}, r"Expected `array` of at least length 4, got 3 - at `\$.turns\[0\]`"),
        ({"conversations": [{"from": "human"}]}, r"missing required field `value` - at `\$.conversations\[0\]`"),
    ],
)
def test_a_broken_conversation_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
        read_trace(written(tmp_path, talk(("u", 1), ("a", 1)), line), "turns")
    with pytest.raises(ConfigError, match=f"conversation 1: .*{message}"):
        read_trace(written(tmp_path, json.dumps([line])), "turns")


def test_files_of_turns_without_any_are_refused(tmp_path):
    for line in ("[]", "[", "[3]", '[{"turns": []}]', '{"turns": [["u", 1, 1, 1]]}'):
        with pytest.raises(ConfigError):
            read_trace(written(tmp_path, line), "turns")


@pytest.mark.parametrize(
    "wrong", [{"rate_per_s": 0}, {"think_median_s": -1}, {"think_sigma": float("nan")}, {"num_conversations": 0}]
)
def test_arrivals_are_checked(wrong):
    with pytest.raises(ConfigError):
        Arrivals(**wrong)


# -- conversations and chains ----------------------------------------------------------------------------------------
def test_chains_begin_with_what_their_prefix_shares():
    assert list(chain_names(2, 2, num_shared=3)) == [0, 1]
    assert list(chain_names(2, 4, num_shared=3)) == [0, 1, 2, 2 * CHAIN_STRIDE]
    shared = [-3 * CHAIN_STRIDE, 1 - 3 * CHAIN_STRIDE]
    assert list(chain_names(2, 3, num_shared=2, prefix=3)) == [*shared, 2 * CHAIN_STRIDE]


def test_over_the_context_the_oldest_turns_go_and_the_rest_is_new():
    collected = TurnsToRequests(block_size=10, max_context=100)
    turns = [TraceTurn(20, 10), TraceTurn(10, 10, 1.0), TraceTurn(25, 10, 1.0), TraceTurn(500, 500, 1.0)]
    collected.add(0.0, turns, prefix=CommonPrefix(0, 20))
    requests = collected.requests()
    assert [(r.num_tokens, r.num_output_tokens) for r in requests] == [(40, 10), (60, 10), (65, 10), (21, 79)]
    assert [list(r.chain[:2]) for r in requests] == [[0, 1]] * 4, "the system prompt stays"
    assert [r.chain[2] // CHAIN_STRIDE for r in requests] == [1, 1, 2, 3]
    with pytest.raises(ConfigError, match="no room"):
        TurnsToRequests(10, max_context=21).add(0.0, turns, prefix=CommonPrefix(0, 20))


def test_the_nominal_order_is_that_of_a_server_that_is_never_busy():
    collected = TurnsToRequests(block_size=10)
    collected.add(0.0, [TraceTurn(10, 25), TraceTurn(10, 25, 10.0)])  # answered at 1 s, the next at 11 s
    collected.add(5.0, [TraceTurn(11, 25), TraceTurn(11, 25, 1.0)])  # the next at 7 s
    requests = collected.requests()
    assert [r.num_tokens for r in requests] == [10, 11, 47, 45]
    assert [(r.after, r.arrival_s) for r in requests] == [(-1, 0.0), (-1, 5.0), (1, 1.0), (0, 10.0)]
