"""How many files of the product one `/chat` turn enters, in all processes: the measure of what a newcomer must know.

Nothing in the product helps: each Python process of the server imports a `sitecustomize` of this test, which notes the
file of every function that a thread calls while a byte, shared through a file, names a turn. Threads that a clock wakes
are left out, and what is counted is what each of a few turns enters.
"""

import os
from pathlib import Path

from tests.support.service.server_process import ROOT, launch

MOST_FILES = 70  # may only shrink; the aim is 60
OFF, TURNS = "0", "123"
PRODUCT = ("engine", "kernels", "kvstore", "rope", "service")
WATCH = """
import mmap, os, sys, threading, time
folder = os.environ["WAY_FOLDER"]
with open(os.path.join(folder, "on"), "r+b") as file:
    on = mmap.mmap(file.fileno(), 1)
entered, log = {}, os.open(os.path.join(folder, "entered"), os.O_WRONLY | os.O_APPEND)

by_the_clock = ("kvstore-housekeeping", "kvstore-files", "kvstore-disk-write")

def begin(frame, event, argument):
    sys.setprofile(None if threading.current_thread().name in by_the_clock else watch)

def watch(frame, event, argument):
    turn = on[0]
    if event == "call" and turn != 48:
        name = frame.f_code.co_filename
        if entered.get(name) != turn:
            entered[name] = turn
            os.write(log, f"{time.monotonic_ns()} {os.getpid()} {chr(turn)} {name}\\n".encode())

threading.setprofile(begin)
sys.setprofile(watch)
"""


def product_files(entered: str) -> list[str]:
    """Names below the checkout of the files that every turn entered, in order of entry; links are followed."""
    lines = sorted((line.split(" ", 3) for line in entered.splitlines()), key=lambda line: int(line[0]))
    by_turn: dict[str, dict[str, None]] = {turn: {} for turn in TURNS}
    for _, _, turn, name in lines:
        by_turn[turn][os.path.relpath(os.path.realpath(name), ROOT)] = None
    first, *others = by_turn.values()
    return [name for name in first if name.split(os.sep)[0] in PRODUCT and all(name in other for other in others)]


def set_switch(switch: Path, turn: str) -> None:
    """In place: the processes have mapped the file."""
    with switch.open("r+") as file:
        file.write(turn)


def test_a_chat_turn_enters_few_files(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    switch, log = tmp_path / "on", tmp_path / "entered"
    switch.write_text(OFF)
    log.touch()
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "WAY_FOLDER": str(tmp_path)}
    server = launch(tmp_path / "store", environment=environment)
    try:
        known = server.post("/chat", {"message": "My name is Ada."}).json()["session_id"]
        server.flush()
        for turn in TURNS:
            set_switch(switch, turn)
            reply = server.post("/chat", {"session_id": known, "message": "What is my name?", "stream": True})
            set_switch(switch, OFF)
            assert reply.events()[-1] == "[DONE]"
    finally:
        server.kill()
    entered = log.read_text()
    files = product_files(entered)
    print(f"{len(files)} files:", *files, sep="\n")
    assert len({line.split()[1] for line in entered.splitlines()}) == 2, "the front and the engine's process"
    assert len(files) <= MOST_FILES
    assert len(files) > MOST_FILES - 10, f"{len(files)} files: lower the bound to that"
