"""What ranks send each other, each rank in a thread of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from kvstore.engine.model.parallel.group import MAX_SENDS, ProcessGroup

WAIT_S = 20.0  # for what hangs


def test_the_last_stage_waits_for_nobody_while_the_first_reads_nothing(tmp_path):
    """As many steps are in flight as there are stages. Behind one that loads the first waits for all stages, and reads
    no rows before.
    """
    size = MAX_SENDS + 2
    pipe = [ProcessGroup(rank, size, "pipe") for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda one: one.join(tmp_path / "rendezvous"), pipe))
    rows = [torch.full((1, 3), float(number)) for number in range(size)]
    have_left = threading.Event()

    def send():
        for one in rows:
            pipe[-1].send(0, one)
        have_left.set()

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    in_time = have_left.wait(WAIT_S)
    received = [pipe[0].receive(size - 1, torch.empty(1, 3)) for _ in rows]
    sending.join()
    assert in_time and torch.equal(torch.cat(received), torch.cat(rows))
