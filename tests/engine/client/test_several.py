"""Two engines behind one front: the same tokens as one has, conversations that stay or move, and one that is killed."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.blocks.records import Evict
from kvstore.engine.outputs import RequestOutput
from kvstore.errors import ConfigError, EngineDiedError
from tests.support.engines import greedy, open_engine, tokens
from tests.support.waiting import wait_until

MODEL = {"tokenizer": True, "max_position_embeddings": 2048}
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(8)]
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)  # seconds
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


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
    eva = shared.sessions.upkeep.unshared_blocks_of(shared.chat("eva").key)
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
    ranks = {name: engine_of_turn(shared, name, hello(name))[0] for name in "ab"}
    assert ranks["a"] != ranks["b"]
    shared.flush()
    killed = pid(shared, ranks["a"])
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
def test_one_that_hangs_is_replaced_and_the_other_goes_on(model, tmp_path):
    with open_two(model, tmp_path / "store", silence_s=15.0) as two:
        hung = two.submit(list(PROMPTS[0]), LONG)
        rank = next(one["rank"] for one in each(two) if one["process"]["requests"])
        os.kill(pid(two, rank), signal.SIGSTOP)
        for prompt in PROMPTS[1:4]:
            assert len(two.generate([prompt], greedy(8))[0].token_ids) == 8
        with pytest.raises(EngineDiedError, match="no sign of life"):
            list(two.stream(hung))
        wait_until(lambda: all_run(two), "the restart")


@pytest.mark.usefixtures("long_only")
def test_a_new_tenant_waits_for_no_engine(model, tmp_path):
    """All have the front's secret."""
    with open_two(model, tmp_path / "store", silence_s=600.0) as two:
        roots = {two.facts.root("anna"), *(one.facts.root("anna") for one in two.core.cores)}
        assert len(roots) == 1
        stopped = pids(two)
        for one in stopped:
            os.kill(one, signal.SIGSTOP)
        assert two.facts.root("bob") not in roots
        assert pids(two) == stopped and two.core.state == "running"
        for one in stopped:
            os.kill(one, signal.SIGCONT)


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
        wait_until(lambda: two.stats()["disk"]["index_loaded"], "the index")
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
    own. `--long` has three, too.
    """
    sizes = (1, 2, 3, 1) if request.config.getoption("--long") else (1, 2, 1)
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
def test_truncation_goes_on_where_the_conversation_is(model, tmp_path):
    """A splice is made where its source is, and its turn is computed there."""
    with open_two(model, tmp_path / "store", max_model_len=256) as two:
        ranks, reused = set(), 0
        for _ in range(10):
            rank, output = engine_of_turn(two, "anna", "Hello, who are you? Tell me about this and that.")
            ranks.add(rank)
            reused += output.usage.cached_tokens_details.reencoded
        assert two.chat("anna").truncated_tokens > 0 and len(ranks) == 1 and reused > 0


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
