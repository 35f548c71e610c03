"""Processes for tests/engine/faults/test_store_faults.py: one that chats until it is killed, and others that end in odd
ways.

Every line of the log is synced after its turn was acknowledged: a session, the turn's number, all its token ids.
"""

import ctypes
import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest does

from kvstore.engine.model.loading import load
from kvstore.errors import DegradedError, StoreError
from tests.support.engines import ask, counters, greedy, open_engine, tokens
from tests.support.waiting import wait_until

SESSIONS = ("red", "green", "blue")
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000


def chat_until_killed(model: str, store: str, log: str, seed: int) -> None:
    """Turns of three sessions in random order, now and then truncated, flushed, evicted or forked."""
    rng = random.Random(seed)
    number = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(number, b"\n")  # the child before may have been killed within a line
    engine = open_engine(model, Path(store), hbm=40 * 12288, cpu=60 * 12288, disk="4MiB")
    chats = {name: engine.chat(name, system=f"You are {name}.") for name in SESSIONS}
    print("ready", flush=True)
    while True:
        name = rng.choice(SESSIONS)
        chat = chats[name]
        text = f"Message {chat.num_turns} of {name}, " + "and more " * rng.randrange(6)
        chat.send(text, greedy(rng.randrange(1, 30)))
        line = json.dumps([name, chat.num_turns, chat.token_ids, chat.messages])
        os.write(number, line.encode() + b"\n")
        os.fsync(number)
        event = rng.random()
        if event < 0.05:
            engine.flush()
        elif event < 0.2:
            engine.loop.pool.evict_all()


def leave_open(model: str, store: str) -> None:
    """An engine that nobody closes, with work in flight."""
    engine = open_engine(model, Path(store))
    chat = engine.chat("left", system="Be brief.")
    chat.send("This is a message that fills a block or two, and its answer another.", greedy(40))
    globals()["kept"] = engine
    print(len(chat.token_ids), flush=True)


def fork_after_opening(model: str, store: str) -> None:
    """The child of a fork may not touch the store; the parent goes on."""
    engine = open_engine(model, Path(store))
    chat = engine.chat("parent")
    chat.send("Before the fork", greedy(5))
    child = os.fork()
    if child == 0:
        refused = 0
        for verb in (
            lambda: engine.generate([[1, 2, 3]], greedy(2)),
            engine.flush,
            lambda: chat.send("In the child", greedy(2)),
            lambda: engine.sessions.load(chat.key),
            engine.admin.verify,
            engine.admin.compact,
            lambda: engine.admin.delete_session("parent"),
        ):
            try:
                verb()
            except StoreError:
                refused += 1
        engine.close()
        engine._finalizer()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    chat.send("After the fork", greedy(5))
    engine.flush()
    engine.close()
    print(os.waitstatus_to_exitcode(status), chat.num_turns, flush=True)


def on_a_full_disk(model: str, store: str, filler: str) -> None:
    """There is no space until another file goes."""
    with open_engine(model, Path(store), cpu="16MiB", disk="1GiB") as engine:
        degraded = False
        for seed in range(100):
            prompt = tokens(seed, 200)
            assert len(ask(engine, prompt, 2).token_ids) == 2
            try:
                engine.flush()
            except DegradedError:
                degraded = True
                break
        assert degraded, "the disk never was full"
        assert engine.stats()["disk"]["degraded"], engine.stats()["disk"]
        again = ask(engine, [*prompt, 1], 2)
        assert again.usage.cached_tokens == 192, "serving goes on"
        ask(engine, tokens(1000, 200), 2)
        os.unlink(filler)
        wait_until(lambda: not engine.stats()["disk"]["degraded"])
        engine.flush()
        engine.check_integrity()
        num_written = engine.stats()["disk"]["blocks"]
    with open(filler, "wb") as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(4096))
    with open_engine(model, Path(store), disk="1GiB") as engine:  # though not a byte is free
        assert engine.admin.verify()["num_ok"] == num_written
        assert ask(engine, [*prompt, 1], 2).token_ids == again.token_ids
        print("recovered", engine.stats()["tokens"]["cached_by_tier"]["disk"], flush=True)


def evict_on_a_disk_that_fills_up(model: str, store: str) -> None:
    """More than fits: the oldest go, nothing fails, and what came last is there."""
    with open_engine(model, Path(store), cpu="2MiB", disk="1GiB") as engine:
        for seed in range(30):
            ask(engine, tokens(seed, 200), 2)
            if seed % 10 == 9:
                engine.flush()
        assert counters(engine)["disk_evictions"] > 0 and engine.stats()["disk"]["degraded"] is None
    with open_engine(model, Path(store), cpu="2MiB", disk="1GiB") as engine:
        assert not engine.admin.verify()["num_corrupt"]
        print(ask(engine, tokens(29, 200), 2).usage.cached_tokens_details.disk, flush=True)


def mount(folder: Path, free_bytes: int) -> Path:
    """A tmpfs of 32 MiB that only this process sees, and a file that takes all of it but this."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(content)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], check=True)
    filler = folder / "filler"
    filler.write_bytes(bytes((32 << 20) - free_bytes))
    return filler


def on_a_small_disk(model: str, folder: str, free_bytes: int) -> None:
    """First the oldest go. Then a store where not a block fits, until another file is deleted."""
    filler = mount(Path(folder), free_bytes)
    evict_on_a_disk_that_fills_up(model, f"{folder}/store")
    on_a_full_disk(model, f"{folder}/other", str(filler))


COMMANDS = {
    "chat": chat_until_killed,
    "leave": leave_open,
    "fork": fork_after_opening,
    "small": on_a_small_disk,
}


def nurse(model: str) -> None:
    """Fork a child for each line of stdin, so that imports are paid once. It says its pid, we its exit status."""
    load(model, "cpu", "auto", None)  # transformers imports what it needs when it needs it
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            COMMANDS[command](*arguments)
            return
        _, status = os.waitpid(child, 0)
        print("exit", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    nurse(sys.argv[1])
