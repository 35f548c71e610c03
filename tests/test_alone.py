"""Threads that move blocks: their tensor operations get no helpers."""

import threading

import torch

from kvstore.transfer import start_alone


def test_they_compute_alone_and_other_threads_as_before():
    """With more compute threads than cores, OpenMP lets those of the model sleep at every barrier."""
    before, found = torch.get_num_threads(), []

    def loop():
        torch.ones(1 << 20).add_(1)  # large enough to be shared out
        found.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        (thread,) = start_alone([("alone", loop)])
        thread.join(30)
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join(30)
        assert found == [1, 2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
