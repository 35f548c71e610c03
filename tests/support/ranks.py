"""Ranks of a model: as threads of this process, what each of them computes without sockets; and their processes."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore import Engine, SamplingParams
from kvstore.engine import process
from kvstore.engine.model.parallel.group import Part
from kvstore.errors import EngineDiedError
from tests.support.engines import cached, counters, evict_hbm, greedy, tokens
from tests.support.waiting import wait_until

WAIT_S, LOOK_S = 120, 0.05
SIZES = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}
BOTH = {**SIZES["tensor"], **SIZES["pipeline"]}
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(6)]
SLIDING, FULL = "sliding_attention", "full_attention"
# Both of two stages have layers with and without a window.
WINDOWED = {"num_hidden_layers": 7, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING]}


@dataclass
class Meeting:
    """Where ranks exchange tensors."""

    parts: list[Tensor | None]
    barrier: threading.Barrier
    sent: dict[tuple[int, int], Queue]  # by from and to; made before the threads, which may look at once
    asked: dict[tuple[int, int], Queue]


def meeting(size: int) -> Meeting:
    pairs = list(product(range(size), repeat=2))
    sent, asked = ({pair: Queue() for pair in pairs} for _ in range(2))
    return Meeting([None] * size, threading.Barrier(size), sent, asked)


@dataclass
class ThreadGroup:
    """A `Pipe` of threads. A send ends when the other has begun to receive."""

    rank: int
    size: int
    meeting: Meeting

    def _exchanged(self, part: Tensor) -> list[Tensor]:
        self.meeting.parts[self.rank] = part.clone()
        self.meeting.barrier.wait(WAIT_S)
        parts = [part for part in self.meeting.parts if part is not None]
        self.meeting.barrier.wait(WAIT_S)
        return parts

    def sum(self, part: Tensor) -> Tensor:
        return torch.stack(self._exchanged(part)).sum(0)

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchanged(part), -1)

    def send(self, rank: int, values: Tensor) -> None:
        self.meeting.sent[self.rank, rank].put(values.clone())
        self._taken(self.meeting.asked[self.rank, rank])

    def receive(self, rank: int, values: Tensor) -> Callable[[], Tensor]:
        self.meeting.asked[rank, self.rank].put(None)
        return lambda: values.copy_(self._taken(self.meeting.sent[rank, self.rank]))

    def _taken(self, queue: Queue) -> Any:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                return queue.get(timeout=LOOK_S)
            except Empty:
                if self.meeting.barrier.broken:
                    raise threading.BrokenBarrierError from None
        raise TimeoutError("the other rank sends nothing, or does not receive")


def on_ranks(size: int, work: Callable[[ThreadGroup], object]) -> list:
    """What `work` returns on each of so many ranks, which run together. Raises what one of them raises."""
    return on_parts(size, 1, lambda part: work(part.group))


def on_parts(tensor_size: int, pipeline_size: int, work: Callable[[Part], object]) -> list:
    """As `on_ranks`, for so many stages of so many ranks each. A stage of one rank has no group, unless it is the only
    one.
    """
    of_stages = [meeting(tensor_size) for _ in range(pipeline_size)]
    of_pipes = [meeting(pipeline_size) for _ in range(tensor_size)]

    def run(rank: int) -> object:
        stage, index = divmod(rank, tensor_size)
        group = ThreadGroup(index, tensor_size, of_stages[stage]) if tensor_size > 1 or pipeline_size == 1 else None
        pipe = ThreadGroup(stage, pipeline_size, of_pipes[index]) if pipeline_size > 1 else None
        try:
            return work(Part(group, pipe))
        except Exception:
            for one in (*of_stages, *of_pipes):  # the others do not wait for it
                one.barrier.abort()
            raise

    size = tensor_size * pipeline_size
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for error in (one.exception() for one in running) if error is not None]
    if errors:
        own = (error for error in errors if "BrokenBarrierError" not in f"{error!r} {error.__cause__!r}")
        raise next(own, errors[0])
    return [one.result() for one in running]


# -- engines -----------------------------------------------------------------------------------------------------------
def check_says(engine: Engine, expected: list[list[int]], prompts: list[list[int]] = PROMPTS) -> None:
    """Computed, then loaded by all ranks."""
    for _ in range(2):
        assert [out.token_ids for out in engine.generate(prompts, greedy(len(expected[0])))] == expected
        evict_hbm(engine)
    found = counters(engine)
    assert found["loaded"] > 0 and found["load_failures"] == found["dropped_saves"] == 0


def check_reads(engine: Engine, expected: list[list[int]], prompts: list[list[int]] = PROMPTS) -> None:
    """Whatever ranks this engine has, it finds all on disk."""
    outs = engine.generate(prompts, greedy(len(expected[0])))
    assert [out.token_ids for out in outs] == expected
    assert [cached(out)[2] for out in outs] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


# -- processes ---------------------------------------------------------------------------------------------------------
def start_as(monkeypatch: pytest.MonkeyPatch, program: str, **environment: str) -> None:
    """From now on the other ranks are this program of `tests.children`, with these variables."""
    monkeypatch.setattr(process, "PROGRAM", f"tests.children.{program}")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def children(pid: int) -> set[int]:
    """Processes that this one has started, in all of its threads."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return {int(child) for each in lists for child in each.split()}


def ranks_of(pid: int) -> list[int]:
    """The other ranks' processes, of the first one's."""
    return sorted(pid for pid in children(pid) if Path(f"/proc/{pid}/comm").read_text() == "kvstore-rank\n")


def rank_of(pid: int) -> int:
    (found,) = ranks_of(pid)
    return found


def end_while_it_answers(engine: Engine, pid: int, number: signal.Signals, match: str | None = None) -> None:
    """Send this process of the engine a signal that ends or hangs it, which ends what is being answered. match: what
    the first error says.
    """
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    handle = engine.submit([*range(40)], long)
    wait_until(lambda: handle.pieces)
    os.kill(pid, number)
    with pytest.raises(EngineDiedError, match=match):
        for _ in engine.stream(handle):
            pass
        engine.generate([[*range(40)]], long)  # if the first answer had come to its end before the signal


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
