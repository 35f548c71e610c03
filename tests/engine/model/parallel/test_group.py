"""What ranks send each other, each rank in a thread of its own; with devices that are none: `test_cuda_ranks_fake`."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvstore.engine.model.parallel.group import MAX_SENDS, DevicePipe, Group, part_of_process
from kvstore.errors import EngineDiedError

WAIT_S = 120.0  # for what hangs


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda:5"])
def test_the_ranks_of_a_stage_have_consecutive_numbers(device):
    part = part_of_process(5, 2, 3, device)
    assert (type(part.group), type(part.pipe)) == (Group, DevicePipe if device == "cuda:5" else Group)
    assert (part.group.rank, part.group.size, part.pipe.rank, part.pipe.size) == (1, 2, 2, 3)
    alone = part_of_process(0, 1, 1, device)
    assert alone.group is None and alone.pipe is None


@pytest.mark.gpu
def test_nccl_with_one_rank(tmp_path):
    device = torch.device("cuda", 0)
    group = Group(0, 1, "stage-0", device)
    group.join(tmp_path / "rendezvous")
    values = torch.arange(6, dtype=torch.bfloat16, device=device).view(2, 3)
    assert torch.equal(group.sum(values.clone()), values) and torch.equal(group.gather(values), values)
    assert group.gather(torch.tensor([7])).tolist() == [7]  # on the host
    group.cut()
    with pytest.raises(EngineDiedError):
        group.sum(values)


@pytest.mark.parametrize("wait", ["sum", "gather", "receive"])
def test_who_waits_for_a_rank_that_says_nothing_is_let_go(tmp_path, wait):
    """The other rank is there and its connection, too."""
    pair = [Group(rank, 2, "pair") for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda one: one.join(tmp_path / "rendezvous"), pair))
        if wait == "receive":
            waiting = threads.submit(pair[0].receive(1, torch.zeros(3)))
        else:
            waiting = threads.submit(getattr(pair[0], wait), torch.zeros(3))
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        pair[0].cut()
        assert isinstance(waiting.exception(WAIT_S), EngineDiedError)
        pair[0].cut()  # there is nothing left to end
    with pytest.raises(EngineDiedError):
        pair[0].sum(torch.zeros(3))


def test_the_last_stage_waits_for_nobody_while_the_first_reads_nothing(tmp_path):
    """As many steps are in flight as there are stages. Behind one that loads the first waits for all stages, and reads
    no rows before.
    """
    size = MAX_SENDS + 2
    pipe = [Group(rank, size, "pipe") for rank in range(size)]
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
    received = [pipe[0].receive(size - 1, torch.empty(1, 3))() for _ in rows]
    sending.join()
    assert in_time and torch.equal(torch.cat(received), torch.cat(rows))
