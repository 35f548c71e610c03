"""The engine on a store that fails under it: killed, full, slow, damaged, owned by two, forked, never closed.

Invariants 3, 5 and 7 of the design. Many rounds of kills: `python -m bench.campaign`.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bench.campaign.servers import value_pages
from kvstore.errors import DegradedError, StoreLockedError
from kvstore.sessions.record import SessionKey
from tests.support.engines import (
    Plain,
    ask,
    cached,
    counters,
    evict_memory,
    greedy,
    open_engine,
    save_model,
    settle,
    tokens,
)
from tests.support.faults import reads_that, stuck_disk, transactions_that
from tests.support.programs import may_mount
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}
NUM_ROUNDS = 3
CHILD = Path(__file__).parents[2] / "children/store_child.py"
ROOT = CHILD.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Nursery:
    """A process that has imported everything and forks a child for each job."""

    def __init__(self, model: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=ENVIRONMENT, cwd=ROOT,
        )  # fmt: skip

    def start(self, *job: object) -> int:
        """Returns the child's pid."""
        self.process.stdin.write(json.dumps([str(a) if isinstance(a, Path) else a for a in job]) + "\n")
        self.process.stdin.flush()
        return int(self.line())

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def run(self, *job: object) -> str:
        """What a child printed that ended well."""
        self.start(*job)
        lines = [self.line()]
        while lines[-1] and not lines[-1].startswith("exit "):
            lines.append(self.line())
        assert lines.pop() == "exit 0", "see what the child wrote to stderr"
        return " ".join(lines)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        while self.line() != "exit -9":
            pass

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(TIMEOUT_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def nursery(model):
    nursery = Nursery(model)
    yield nursery
    nursery.close()


# -- killed ------------------------------------------------------------------------------------------------------------
def acknowledged(log: Path) -> dict[str, list]:
    """The last acknowledged turn of each session. The last line of each child may be torn, and was not acknowledged."""
    found = {}
    for line in log.read_bytes().split(b"\n")[:-1] if log.exists() else ():
        with suppress(json.JSONDecodeError):
            name, *rest = json.loads(line)
            found[name] = rest
    return found


def num_turns(log: Path) -> int:
    return sum(turns for turns, _, _ in acknowledged(log).values())


def check_after_kill(model: str, store: Path, log: Path, plain: Plain) -> None:
    """Every acknowledged turn is there, exactly; what is stored is sound, and gives right answers."""
    with open_engine(model, store, hbm=40 * 12288, cpu=60 * 12288, disk="4MiB") as engine:
        report = engine.admin.verify()
        assert report["num_corrupt"] == report["num_orphans"] == 0 and report["is_complete"]
        assert not report["sessions"]["problems"]
        for name, (num_turns, token_ids, messages) in acknowledged(log).items():
            state = engine.sessions.load(SessionKey("", name))
            assert num_turns <= state.turn <= num_turns + 1, "an acknowledged turn is lost"
            if state.turn == num_turns:
                assert (state.token_ids, state.messages) == (token_ids, messages)
            exact = state.token_ids[-200:]
            assert ask(engine, exact, 4).token_ids == plain(exact, 4)
            whole = state.token_ids[:250]
            assert ask(engine, whole, 4).token_ids == plain(whole, 4)
            if state.first_reencoded is None:
                fork = engine.chat(name).fork(f"fork-{name}-{os.urandom(6).hex()}")
                out = fork.send("Where were we?", greedy(3))
                assert out.prompt_token_ids[: len(state.token_ids)] == state.token_ids or fork.truncated_tokens
                if fork.window.lineage.splice_index is None:
                    assert out.token_ids == plain(out.prompt_token_ids, 3)
                engine.admin.delete_session(fork.session_id)
        settle(engine)


def test_invariant_5_kill_at_any_moment_loses_no_acknowledged_turn(nursery, model, store, plain, tmp_path):
    """RocksDB's crash test: a child chats until it is killed, again and again in the same store."""
    rng, log = random.Random(1), tmp_path / "log"

    def are_enough() -> bool:
        return len(acknowledged(log)) == 3 and num_turns(log) > 20

    for number in range(NUM_ROUNDS):
        pid = nursery.start("chat", model, store, log, rng.randrange(1 << 30))
        assert nursery.line() == "ready"
        wanted = num_turns(log) + rng.randrange(8)  # by turns and not by the clock: a busy machine makes few
        wait_until(lambda wanted=wanted: num_turns(log) >= wanted, "turns are made")
        if number == NUM_ROUNDS - 1:
            wait_until(are_enough, "turns of all sessions")
        time.sleep(rng.uniform(0.02, 0.2))
        nursery.kill(pid)
        if number % 2:  # in between a crash is followed by the next run at once
            check_after_kill(model, store, log, plain)
    check_after_kill(model, store, log, plain)


# -- forked, never closed ----------------------------------------------------------------------------------------------
def test_a_forked_child_may_not_touch_the_store(nursery, model, store):
    assert nursery.run("fork", model, store) == "7 2"


def test_an_engine_that_nobody_closes_drains_at_exit(nursery, model, store, plain):
    num_tokens = int(nursery.run("leave", model, store))
    with open_engine(model, store) as engine:
        chat = engine.chat("left")
        assert len(chat.token_ids) == num_tokens
        out = chat.send("Go on", greedy(5))
        assert cached(out)[2] == (num_tokens - 1) // 16 * 16 and out.token_ids == plain(out.prompt_token_ids, 5)


def test_a_turn_is_on_disk_within_two_seconds_without_a_flush(model, store):
    with open_engine(model, store) as engine:
        ask(engine, tokens(2, 100), 2)
        wait_until(lambda: engine.stats()["disk"]["blocks"] == 6, "it is written")


# -- full --------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not may_mount(), reason="no tmpfs can be mounted here")
def test_invariant_7_a_full_file_system_makes_do_then_degrades_and_recovers(nursery, model, tmp_path):
    assert nursery.run("small", model, tmp_path, 4 << 20) == "192 recovered 192"


def flip_bits(store: Path) -> None:
    """In six stored blocks."""
    data, rng = store / "blocks" / "data.mdb", random.Random(3)
    content = bytearray(data.read_bytes())
    for start in rng.sample(value_pages(content), 6):
        content[start + 600 + rng.randrange(3000)] ^= 1 << rng.randrange(8)
    data.write_bytes(content)


# -- failing and damaged -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["Llama", "Qwen3_5Text"])
def test_invariant_3_flipped_bytes_are_computed_and_counted_and_never_reach_an_answer(name, saved_model, store):
    """Of KV, and of states, of which a part alone is of no use."""
    model = saved_model(name, **MODEL)
    plain = Plain(model)
    prompts = [tokens(seed, 100) for seed in range(10, 22)]
    with open_engine(model, store) as engine:
        for prompt in prompts:
            ask(engine, prompt, 2)
        settle(engine)
    flip_bits(store)
    with open_engine(model, store) as engine:
        hits = 0
        for prompt in prompts:
            out = ask(engine, [*prompt, 1], 4)
            assert out.token_ids == plain([*prompt, 1], 4)
            hits += sum(cached(out))
        assert 0 < hits < 96 * len(prompts)
        assert counters(engine)["read_failures"].get("corrupt", 0) > 0
        settle(engine)
        assert engine.admin.verify()["num_corrupt"] == 0, "what was damaged has been replaced"
        evict_memory(engine)
        for prompt in prompts:
            assert sum(cached(ask(engine, [*prompt, 2], 2))) == 96
    plain.engine.close()


def test_a_check_says_how_many_blocks_it_took_out(model, store):
    """With those that were computed after damaged ones."""
    with open_engine(model, store) as engine:
        ask(engine, tokens(7, 240), 2)
        settle(engine)
        num_stored = engine.admin.verify()["num_ok"]
    flip_bits(store)
    with open_engine(model, store) as engine:
        report = engine.admin.verify(delete=True)
        num_damaged, num_deleted = report["num_corrupt"], report["num_deleted"]
        assert num_damaged > 0 and report["num_ok"] == num_stored - num_damaged
        settle(engine)
        left = engine.admin.verify()
        assert left["num_corrupt"] == 0 and left["num_ok"] == num_stored - num_deleted < num_stored - num_damaged


def test_a_data_file_of_garbage_is_set_aside_and_sessions_stay(model, store, plain):
    with open_engine(model, store) as engine:
        chat = engine.chat("kept")
        chat.send("Hello there, how are you?", greedy(20))
        token_ids = list(chat.token_ids)
    (store / "blocks" / "data.mdb").write_bytes(random.Random(1).randbytes(1 << 20))
    with pytest.warns(RuntimeWarning, match="moved to quarantine"):
        engine = open_engine(model, store)
    with engine:
        chat = engine.chat("kept")
        assert chat.token_ids == token_ids
        out = chat.send("Go on", greedy(5))
        assert cached(out) == (0, 0, 0, 0) and out.token_ids == plain(out.prompt_token_ids, 5)


def test_invariant_1_reads_that_raise_end_in_computing(model, store, plain):
    import lmdb

    prompts = [tokens(seed, 100) for seed in (40, 41)]
    with open_engine(model, store) as engine:
        for prompt in prompts:
            ask(engine, prompt, 2)
        evict_memory(engine)

        errors = itertools.cycle([lmdb.DiskError("injected"), ValueError("unforeseen")])

        def fail():
            raise next(errors)

        with reads_that(fail):
            outs = engine.generate([[*prompt, 1] for prompt in prompts], greedy(4))
        assert [out.token_ids for out in outs] == [plain([*prompt, 1], 4) for prompt in prompts]
        found = counters(engine)
        assert set(found["read_failures"]) == {"failed"}
        assert found["read_failures"]["failed"] + found["cancelled_reads"] == 12  # behind one that failed, or read too
        settle(engine)


def test_invariant_5_writes_that_fail_are_made_up_for(model, store, plain):
    """The nth transaction fails, for n until none does."""
    import lmdb

    for number in range(1000):
        count = 0

        def failing(number=number):
            nonlocal count
            count += 1
            if count == number + 1:
                raise lmdb.DiskError("injected")

        prompt = tokens(50 + number, 60)
        with transactions_that(failing), open_engine(model, store) as engine:
            out = ask(engine, prompt, 20)
            parts = engine.connector.parts
            wait_until(lambda parts=parts: parts.store.is_idle and not parts.degraded, "idle")
            settle(engine)
            history = prompt + out.token_ids
        with open_engine(model, store) as engine:
            again = ask(engine, [*history, 1], 4)
            assert cached(again)[2] == 64 and again.token_ids == plain([*history, 1], 4)
        if count <= number:
            break
    assert 0 < number < 20


# -- slow --------------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_stuck_does_not_hold_up_the_end_for_ever(model, store):
    with stuck_disk() as go:
        engine = open_engine(model, store)
        ask(engine, tokens(80, 100), 4)
        ended = threading.Event()
        closing = threading.Thread(target=lambda: (engine.close(), ended.set()))
        closing.start()
        assert ended.wait(TIMEOUT_S), "close waits for a disk that does not answer"
        try:
            with pytest.raises(StoreLockedError):
                open_engine(model, store)  # the writer still has the file
        finally:
            go.set()
            closing.join()


def test_invariant_7_a_conversation_larger_than_the_disk_does_not_stop_it(tmp_path, store):
    """Its head is stored, its tail is not; flush returns, and others find room afterwards."""
    long = save_model(tmp_path / "long", max_position_embeddings=2048)
    plain, prompt, other = Plain(long), tokens(90, 1500), tokens(91, 200)
    with open_engine(long, store, disk="1MiB", cpu="4MiB", hbm="8MiB") as engine:
        assert ask(engine, prompt, 4).token_ids == plain(prompt, 4)
        engine.flush()
        num_stored = engine.stats()["disk"]["blocks"]
        assert 20 < num_stored < 93 and counters(engine)["dropped_writes"] > 0
        assert ask(engine, other, 4).token_ids == plain(other, 4)
        engine.flush()
        engine.check_integrity()
    with open_engine(long, store, disk="1MiB", cpu="4MiB", hbm="8MiB") as engine:
        out = ask(engine, other, 4)
        assert cached(out)[2] == 192 and out.token_ids == plain(other, 4)
        out = ask(engine, prompt, 4)
        assert cached(out)[2] > 0 and out.token_ids == plain(prompt, 4)
    plain.engine.close()


def test_flush_says_that_the_disk_cannot_write(model, store):
    import lmdb

    def fail():
        raise lmdb.DiskError("injected")

    with open_engine(model, store) as engine:
        with transactions_that(fail):
            ask(engine, tokens(81, 60), 4)
            with pytest.raises(DegradedError, match="cannot write"):
                engine.flush()
            assert engine.stats()["disk"]["degraded"] and counters(engine)["dropped_writes"] > 0
        wait_until(lambda: not engine.stats()["disk"]["degraded"])
        engine.flush()
        assert engine.stats()["disk"]["blocks"] == 3
