"""Two engines behind one front: the same tokens as one has, conversations that stay or move, and one that is killed.

What they share is divided; where a conversation was is known; what each counts is added up.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.blocks.ids import extend_chain, lineage_root
from kvstore.blocks.records import Evict
from kvstore.engine.client.opening import check_divisible, divided, environment_of_each
from kvstore.engine.client.several import Whereabouts, total, total_stats
from kvstore.engine.config import EngineConfig
from kvstore.engine.outputs import RequestOutput
from kvstore.errors import ConfigError, EngineDiedError
from kvstore.stats import Histogram
from tests.support.engines import greedy, open_engine, tokens
from tests.support.waiting import wait_until

MODEL = {"tokenizer": True, "max_position_embeddings": 2048}
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(8)]
LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)  # seconds
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SYSTEM = tokens(99, 64)
SECRET = "the secret of this fleet, 32 characters"


def open_two(model: str, path: Path | None = None, size: int = 2, cpu="4MiB", **options) -> Engine:
    tiers = CacheTiers("4MiB", cpu) if path is None else CacheTiers("4MiB", cpu, "32MiB", path)
    return Engine(model, tiers, device="cpu", load="always", data_parallel_size=size, **options, process="own")


@pytest.fixture
def long_only(request):
    """Each starts two engines or more, for what others test in part."""
    if not request.config.getoption("--long"):
        pytest.skip("needs --long")


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    """For all tests. The last two evict everything and kill one of the two."""
    with open_two(model, tmp_path_factory.mktemp("shared") / "store") as engine:
        yield engine
        assert not engine.has_work
    assert engine.core.state == "closed" and engine.closed


def each(engine: Engine) -> list[dict]:
    return engine.stats()["replicas"]


def finished(engine: Engine) -> list[int]:
    return [one["requests"]["finished"] for one in each(engine)]


def pid(engine: Engine, rank: int) -> int:
    return each(engine)[rank]["process"]["pid"]


def pids(engine: Engine) -> list[int]:
    return [one.pid for one in engine.core.cores]


def engine_of_turn(engine: Engine, session_id: str, text: str):
    """(rank, output) of a turn."""
    before = finished(engine)
    output = engine.chat(session_id).send(text, SHORT)
    return [now - then for now, then in zip(finished(engine), before, strict=True)].index(1), output


def hello(name: str) -> str:
    """Another one for each, else one engine has the KV of all."""
    return (
        f"I am {name}, hello! Who are you? Tell me about this and that, and about all the rest, {name} wants to know."
    )


def all_run(engine: Engine) -> bool:
    return all(one["process"]["state"] == "running" for one in each(engine))


def generate_at_once(engine: Engine, prompts: list[list[int]]) -> list[RequestOutput]:
    """No answer has ended before the last request is sent: where that goes hangs on what runs."""
    stopped = pids(engine)
    for one in stopped:
        os.kill(one, signal.SIGSTOP)
    try:
        handles = [engine.submit(prompt, greedy(24)) for prompt in prompts]
    finally:
        for one in stopped:
            os.kill(one, signal.SIGCONT)
    for handle in handles:
        list(engine.stream(handle))
    return [handle.output for handle in handles]


def test_two_say_what_one_does_and_share_the_work(shared, plain):
    before = finished(shared)
    for _ in range(2):  # computed, then found
        outs = generate_at_once(shared, PROMPTS)
        assert [out.token_ids for out in outs] == [plain(prompt, 24) for prompt in PROMPTS]
    assert all(out.usage.cached_tokens for out in outs), "each prompt went where it was before"
    assert [now - then for now, then in zip(finished(shared), before, strict=True)] == [8, 8], "half of each round"
    choices = shared.generate([PROMPTS[0]], SamplingParams(n=3, seed=5, max_tokens=8))[0].choices
    assert len(choices) == 3


def test_a_conversation_stays_where_it_was(shared):
    ranks = {}
    for session_id in ("anna", "bob", "carl", "dora"):
        ranks[session_id], _ = engine_of_turn(shared, session_id, hello(session_id))
    assert sorted(ranks.values()) == [0, 0, 1, 1]
    for session_id, rank in ranks.items():
        now, output = engine_of_turn(shared, session_id, "and then?")
        found = output.usage.cached_tokens_details
        assert now == rank and found.hbm > 0 and found.disk == 0


def test_new_conversations_come_to_the_engine_that_has_their_document(shared):
    document = {"type": "text", "text": "Seven lamps and a letter. " * 40, "reuse": "reencode"}
    for number in range(6):
        asked = [{"type": "text", "text": f"{number} times, read this: "}, document, {"type": "text", "text": "Well?"}]
        usage = shared.generate([[{"role": "user", "content": asked}]], greedy(2))[0].usage
        assert usage.cached_tokens_details.reencoded > 200, number


def test_counters_add_up(shared):
    shared.generate(PROMPTS, greedy(4))
    shared.flush()
    stats = shared.stats()
    for part, names in (("requests", ("finished", "running")), ("tokens", ("prompt_tokens", "completion_tokens"))):
        for name in names:
            assert stats[part][name] == sum(one[part][name] for one in stats["replicas"])
    assert stats["hbm"]["blocks"] == sum(one["hbm"]["blocks"] for one in stats["replicas"])
    assert stats["hbm"]["block_size"] == 16 and stats["process"]["state"] == "running"
    assert stats["disk"]["blocks"] == stats["store"]["written"] > 0 and "remote" not in stats


def test_eviction_and_deletion_reach_all_tiers_of_all(shared):
    for session_id in ("eva", "ida"):
        engine_of_turn(shared, session_id, hello(session_id))
    shared.flush()

    def blocks() -> list[int]:
        stats = shared.stats()
        return [
            *(one["hbm"]["cached_blocks"] for one in stats["replicas"]),
            *(one["cpu"]["cached_blocks"] for one in stats["replicas"]),
            stats["disk"]["blocks"],
        ]

    assert min(blocks()) > 0
    eva = shared.sessions.unshared_blocks_of(shared.chat("eva").key)
    before = blocks()
    assert shared.admin.delete_session("eva") >= len(eva) > 0
    after = blocks()
    assert after[-1] < before[-1] and sum(after[:2]) < sum(before[:2]) and sum(after[2:4]) < sum(before[2:4])
    counted = shared.admin.evict(Evict(everything=True, dry_run=True))
    assert shared.admin.evict(Evict(everything=True)) == counted
    assert counted["disk"].num_blocks == after[-1] and counted["cpu"].num_blocks == sum(after[2:4])
    shared.flush()
    assert blocks() == [0] * 5


def test_one_is_killed_in_the_middle_of_a_turn(shared, plain):
    """Its requests end with an error and those of the other go on; its conversations go on there, from the disk."""
    busy = shared.chat("b").stream(hello("b"), LONG)
    next(busy)
    rank, _ = engine_of_turn(shared, "a", hello("a"))  # where nothing runs
    busy.close()
    shared.flush()
    killed = pid(shared, rank)
    other = shared.chat("b").stream("and then?", LONG)
    answer = shared.chat("a").stream("and then?", LONGER)
    next(other), next(answer)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        list(answer)
    assert sum(len(piece.token_ids) for piece in other) == LONG.max_tokens - 1
    assert shared.core.state == "running" and shared.chat("a").num_turns == 1
    output = shared.chat("a").send("and then?", SHORT)
    assert output.usage.cached_tokens >= 16 and shared.chat("a").num_turns == 2
    wait_until(lambda: all_run(shared), "the restart")
    assert shared.stats()["process"]["restarts"] == 1
    for prompt in PROMPTS:  # at both, as before
        assert shared.generate([prompt], greedy(12))[0].token_ids == plain(prompt, 12)


@pytest.mark.usefixtures("long_only")
def test_one_that_hangs_does_not_keep_the_other_from_closing(model, tmp_path):
    two = open_two(model, tmp_path / "store", silence_s=600.0, shutdown_s=600.0)
    hung, other = map(psutil.Process, pids(two))
    hung.suspend()
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(two.close)
        try:
            wait_until(lambda: not other.is_running(), "the end of the other")
            assert hung.is_running() and not closing.done()
        finally:
            hung.kill()
        closing.result()


@pytest.mark.usefixtures("long_only")
def test_a_pin_keeps_a_conversation_on_the_disk(model, tmp_path):
    """CPU tiers and disk are far too small for the others."""
    tiers = CacheTiers("4MiB", "1MiB", "4MiB", tmp_path / "store")
    with Engine(model, tiers, device="cpu", load="always", data_parallel_size=2, process="own") as two:
        two.chat("kept").send("Hello, who are you? Tell me about this and that.", SHORT)
        two.flush()
        two.admin.pin("kept", 3600)
        assert two.admin.pinned_until(two.chat("kept").key) is not None
        for seed in range(100, 124):
            two.generate([tokens(seed, 300)], greedy(2))
            two.flush()
        assert two.stats()["store"]["disk_evictions"] > 0
        kept = two.chat("kept").window.chain
        assert two.core._disk.has(kept, is_use=False) == [True] * len(kept)


def test_their_number_may_change_between_starts(model, plain, tmp_path, request):
    """Conversations stay whole, and what is on disk is of use to any number, also to an engine with a disk of its
    own. `--long` has more of them.
    """
    sizes = (1, 2, 3, 1) if request.config.getoption("--long") else (2, 1)
    said: dict[str, list[str]] = {"anna": [], "bob": [], "carl": []}
    for turn, size in enumerate(sizes):
        with open_two(model, tmp_path / "store", size) as engine:
            for session_id, known in said.items():
                chat = engine.chat(session_id)
                assert [one["content"] for one in chat.messages] == known and chat.num_turns == turn
                output = chat.send(hello(session_id), SHORT)
                assert (output.usage.cached_tokens_details.disk >= 32) == (turn > 0)
                said[session_id] = [one["content"] for one in chat.messages]
            outs = engine.generate(PROMPTS, greedy(8))
            assert [out.token_ids for out in outs] == [plain(prompt, 8) for prompt in PROMPTS]
            assert (min(out.usage.cached_tokens_details.disk for out in outs) >= 16) == (turn > 0)
            engine.flush()


@pytest.mark.usefixtures("long_only")
def test_without_a_disk_they_share_nothing_but_the_conversations(model):
    with open_two(model) as two:
        rank, _ = engine_of_turn(two, "anna", "Hello, who are you? Tell me about this and that.")
        assert "disk" not in two.stats() and engine_of_turn(two, "anna", "and then?")[0] == rank
        os.kill(pid(two, rank), signal.SIGKILL)
        wait_until(lambda: each(two)[rank]["process"]["state"] != "running", "its end")
        output = two.chat("anna").send("and then?", SHORT)
        assert len(output.token_ids) == 20 and two.chat("anna").num_turns == 3


@pytest.mark.usefixtures("long_only")
def test_each_may_be_several_ranks(model, plain, tmp_path):
    with open_two(model, tmp_path / "store", tensor_parallel_size=2) as two:
        outs = two.generate(PROMPTS[:4], greedy(12))
        assert [out.token_ids for out in outs] == [plain(prompt, 12) for prompt in PROMPTS[:4]]
        two.flush()
    with open_engine(model, tmp_path / "store") as engine:
        outs = engine.generate(PROMPTS[:4], greedy(12))
        assert [out.token_ids for out in outs] == [plain(prompt, 12) for prompt in PROMPTS[:4]]
        assert min(out.usage.cached_tokens_details.disk for out in outs) >= 16


def test_a_tier_without_room_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="cpu is"):
        open_two(model, tmp_path / "store", cpu="4KiB")


def chain(token_ids: list[int], *owner: str) -> list[bytes]:
    found: list[bytes] = []
    extend_chain(found, lineage_root(b"secret", "model", *owner), token_ids, 16)
    return found


def conversation(seed: int, num_tokens: int = 40) -> list[int]:
    return [*SYSTEM, *tokens(seed, num_tokens)]


def test_a_conversation_goes_on_where_it_was():
    known = Whereabouts()
    first, second = tokens(1, 50), tokens(2, 50)
    assert known.engine_of(chain(first)) is None
    known.note(chain(first), 1)
    known.note(chain(second), 0)
    assert known.engine_of(chain([*first, *tokens(3, 500)])) == 1
    assert known.engine_of(chain([*second, *tokens(4, 30)])) == 0
    assert known.engine_of(chain(first[:40])) == 1, "a shorter prompt of it"


def test_it_moves_with_its_last_turn():
    known = Whereabouts()
    for length, engine in ((40, 0), (100, 1), (160, 1)):
        known.note(chain(tokens(1, length)), engine)
    assert known.engine_of(chain(tokens(1, 200))) == 1


def test_a_shared_beginning_says_nothing():
    known = Whereabouts()
    known.note(chain(conversation(1)), 0)
    known.note(chain(conversation(2)), 0)
    assert known.engine_of(chain(conversation(3))) is None
    assert known.engine_of(chain(conversation(1, 80))) == 0, "what follows it says where it was"
    known.note(chain(conversation(3)), 1)
    assert [known.engine_of(chain(conversation(seed, 60))) for seed in (1, 2, 3)] == [0, 0, 1]


def test_a_name_tells_agents_with_a_shared_beginning_apart():
    known = Whereabouts(40)
    for seed in (1, 2):
        known.note(chain(conversation(seed)), seed - 1, b"agent %d" % seed)
    for seed in (1, 2):
        assert known.engine_of(chain(conversation(3)), b"agent %d" % seed) == seed - 1
        assert known.engine_of(chain(tokens(5, 60)), b"agent %d" % seed) == seed - 1, "all of it was edited"
        assert known.engine_of(chain(conversation(3 - seed, 80)), b"agent %d" % seed) == 2 - seed, "its KV is there"
    assert known.engine_of(chain(conversation(3)), b"agent 3") is None
    for seed in range(10, 20):
        known.note(chain(tokens(seed, 160)), 1)
    assert known.engine_of(chain(tokens(5, 60)), b"agent 1") is None and len(known) == 40


def test_tenants_and_salts_are_apart():
    known = Whereabouts()
    known.note(chain(SYSTEM, "anna"), 1)
    assert known.engine_of(chain(SYSTEM, "anna")) == 1
    assert known.engine_of(chain(SYSTEM, "bob")) is None
    assert known.engine_of(chain(SYSTEM, "anna", "salt")) is None


def test_what_was_used_least_recently_is_forgotten_from_its_tail():
    known = Whereabouts(20)
    known.note(chain(tokens(1, 160)), 0)
    known.note(chain(tokens(2, 160)), 1)
    known.note(chain(tokens(3, 80)), 1)
    assert len(known) == 20
    assert known.engine_of(chain(tokens(1, 80))) == 0 and known.engine_of(chain(tokens(2, 160))) == 1
    for seed in range(10, 30):
        known.note(chain(tokens(seed, 160)), 1)
    assert known.engine_of(chain(tokens(1, 160))) is None and len(known) == 20


def test_each_has_its_part_of_memory_and_none_of_the_disk(tmp_path):
    tiers = CacheTiers(hbm="1GiB", cpu="4GiB", disk="10GiB", path=str(tmp_path))
    each = divided(EngineConfig(None, tiers, data_parallel_size=4), b"\1" * 32, "socket")
    assert [one.data_parallel_rank for one in each] == [0, 1, 2, 3]
    for one in each:
        assert (one.tiers.hbm, one.tiers.cpu, one.tiers.disk) == (1 << 30, 1 << 30, 0)
        assert one.common_root() == b"\1" * 32 and one.disk_owner == "socket"
        assert EngineConfig.of(one.arguments()) == one
        assert "0101" not in repr(one)


def test_what_cannot_be_shared_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET)
    disk = {"disk": "1GiB", "path": tmp_path}
    wrong = {
        "cpu is 0": EngineConfig(None, CacheTiers(**disk), data_parallel_size=2),
        "remote is set, but so is a disk, .*; give disk=0": EngineConfig(
            None, CacheTiers(cpu="1GiB", remote="redis://localhost", **disk), data_parallel_size=2
        ),
        "distributed_executor": EngineConfig(None, distributed_executor="ray", data_parallel_size=2),
        "kv_events": EngineConfig(None, kv_events="tcp://*:5557", data_parallel_size=2),
    }
    for words, config in wrong.items():
        with pytest.raises(ConfigError, match=words):
            check_divisible(config)
        check_divisible(replace(config, data_parallel_size=1))
    for size in (0, 65, "2", True):
        with pytest.raises(ConfigError, match="data_parallel_size is"):
            EngineConfig(None, data_parallel_size=size)
    with pytest.raises(ConfigError, match="device is cuda:1"):
        EngineConfig(None, device="cuda:1", data_parallel_size=2)


def test_processors_are_divided_unless_the_user_has_said(monkeypatch):
    num = len(os.sched_getaffinity(0))
    assert environment_of_each(1, {}) == {} == environment_of_each(2, {"OMP_NUM_THREADS": "8"})
    assert environment_of_each(num, {}) == {"OMP_NUM_THREADS": "1"} == environment_of_each(10 * num, {})


def test_numbers_are_added_item_by_item():
    one, other = {"a": 1, "b": {"c": 2.5, "d": None}, "e": [1, 2]}, {"a": 4, "b": {"c": 1, "d": 3}, "e": [10, 20]}
    assert total([one, other]) == {"a": 5, "b": {"c": 3.5, "d": 3}, "e": [11, 22]}
    assert total([{"x": 1}, {"y": 2}]) == {"x": 1, "y": 2}, "one has counted what the other has not met"


def test_what_is_no_amount_is_not_added():
    one = {"block_size": 16, "policy": "auto", "is_auto": False, "read_bytes_per_s": 10.0, "degraded": None}
    other = {"block_size": 16, "policy": "auto", "is_auto": True, "read_bytes_per_s": 30.0, "degraded": "no answer"}
    assert total([one, other]) == {
        "block_size": 16, "policy": "auto", "is_auto": True, "read_bytes_per_s": 20.0, "degraded": "no answer",
    }  # fmt: skip
    assert total([{"read_bytes_per_s": None}, {"read_bytes_per_s": 7}]) == {"read_bytes_per_s": 7}


def test_histograms_keep_their_bounds():
    first, second = Histogram(), Histogram()
    first.observe(0.1)
    second.observe(3.0)
    both = total([first.as_dict(), second.as_dict()])
    assert both["bounds"] == first.as_dict()["bounds"]
    assert sum(both["counts"]) == 2 and both["sum"] == 3.1


def test_the_disk_is_counted_once():
    policy = {"evictable": {"cpu": 3, "disk": 0}, "in_force": {"cpu": "return", "disk": "return"}}
    engine = {"hbm": {"blocks": 5}, "store": {"read": 0, "remote_read": 2}, "policy": policy,
              "remote": {"degraded": None}, "lost": None}  # fmt: skip
    disk = {"disk": {"blocks": 9, "degraded": None}, "store": {"read": 4}, "lost": "gone",
            "policy": {"evictable": {"disk": 9}, "in_force": {"disk": "lru"}}}  # fmt: skip
    found = total_stats([engine, {**engine, "remote": {"degraded": "no answer in time"}}], disk)
    assert found["store"] == {"read": 4, "remote_read": 4} and found["hbm"] == {"blocks": 10}
    assert found["disk"] == {"blocks": 9, "degraded": "no answer in time"} and found["lost"] == "gone"
    assert found["policy"]["evictable"] == {"cpu": 6, "disk": 9} and "remote" not in found
    assert total_stats([engine, engine], None)["remote"] == {"degraded": None}
