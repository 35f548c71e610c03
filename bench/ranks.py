"""What it costs a step that the first rank sends it to another one: everything except computing and all-reduce.

`python -m bench.ranks`: a step's arrays are packed, sent to a process, turned into tensors there, and answered.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from bench.common import Report, arguments, median, run
from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.model.step.tensors import step_tensors
from kvstore.engine.process import Channel, encode
from kvstore.engine.ranks.wire import Moved, RankStep, decode_from_rank, decode_to_rank, step_of

BLOCK_SIZE = 16
STEPS = {  # requests, tokens of each, context length
    "decode, 1 request": (1, 1, 1024),
    "decode, 8 requests": (8, 1, 1024),
    "decode, 64 requests": (64, 1, 1024),
    "decode, 64 requests of 8,192": (64, 1, 8192),
    "prefill of 2,048": (1, 2048, 2048),
}


def main() -> int:
    parser = arguments("ranks", __doc__ or "")
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.answer is not None:
        answer(Channel(socket.socket(fileno=parsed.answer)))
        return 0
    return run(measure, parsed, "A step told to another rank")


def measure(parsed: argparse.Namespace, report: Report) -> None:
    for name, shape in STEPS.items():
        report.add(step=name, **measured(200 if parsed.quick else 2000, *shape))


def answer(channel: Channel) -> None:
    """The other rank, without a model."""
    while not channel.ended:
        channel.poll(-1)
        for message in map(decode_to_rank, channel.receive()):
            assert isinstance(message, RankStep)
            step_tensors(*message.inputs(), BLOCK_SIZE, torch.device("cpu"))
            channel.send_all(encode(Moved(0, False, True)))


def measured(count: int, num_requests: int, num_tokens: int, context_len: int) -> dict[str, Any]:
    """The medians of so many steps."""
    inputs, table = made_up(num_requests, num_tokens, context_len)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "bench.ranks", "--answer", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"})
    channel, sends, rounds = Channel(ours), list[float](), list[float]()
    for _ in range(count):
        started = time.perf_counter()
        message = encode(step_of(inputs, table, None, ((), ()), None))
        channel.send_all(message)
        sent, answered = time.perf_counter(), list[bytes]()
        while not answered:
            channel.poll(-1)
            answered = channel.receive()
        rounds.append(time.perf_counter() - started)
        sends.append(sent - started)
        decode_from_rank(answered[0])
    channel.close()
    process.wait()
    warm = slice(count // 10, None)
    return {
        "bytes": len(message),
        "packed and sent, us": median(sends[warm]) * 1e6,
        "until answered, us": median(rounds[warm]) * 1e6,
    }


def made_up(num_requests: int, num_tokens: int, context_len: int) -> tuple[StepInputs, np.ndarray]:
    """A step of so many requests, and the block table of its rows."""
    width = -(-context_len // BLOCK_SIZE)
    table = np.arange(num_requests * width, dtype=np.int32).reshape(num_requests, width)
    starts = np.arange(num_requests + 1, dtype=np.int64) * num_tokens
    ids = np.arange(starts[-1], dtype=np.int64)
    rows = np.arange(num_requests, dtype=np.int64)
    lens = np.full(num_requests, context_len, np.int64)
    return StepInputs(ids, ids, ids, starts, lens, rows, starts[1:] - 1, rows, rows), table


if __name__ == "__main__":
    sys.exit(main())
