"""How ranks of other machines come in: with the secret, in time, each to its place; and what they hear otherwise."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.engine.ranks.door import CHANNEL, KINDS, PULSE, Door, entered
from kvstore.errors import ConfigError, EngineDiedError

KEY, OTHER = b"k" * 32, b"o" * 32
ENOUGH_S, SHORT_S = 60.0, 0.2


def come(door: Door, rank: int, kind: int, key: bytes = KEY) -> socket.socket:
    return entered(door.host, door.port, rank, kind, key)


def test_each_rank_gets_its_place():
    with Door("127.0.0.1", KEY) as door, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(door.others, 3, ENOUGH_S)
        theirs = {(rank, kind): come(door, rank, kind) for kind in reversed(KINDS) for rank in (2, 1)}
        ours = waiting.result()
        assert sorted(ours) == [1, 2]
        for (rank, kind), end in theirs.items():
            end.sendall(bytes([rank, kind]))
            assert ours[rank][kind].recv(2) == bytes([rank, kind])
            end.close()
            ours[rank][kind].close()


def test_another_secret_is_told_to_both():
    with Door("127.0.0.1", KEY) as door, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(door.others, 2, 8.0)
        with pytest.raises(ConfigError, match=r"rank 1: the first rank at 127\.0\.0\.1 port \d+ has another secret"):
            come(door, 1, PULSE, OTHER)
        with pytest.raises(EngineDiedError, match=r"rank 1 of 2 has not come .* 1 connections did not know the secret"):
            waiting.result()


def test_who_listens_must_know_the_secret_too():
    """A rank tells nothing to one that does not."""
    with socket.create_server(("127.0.0.1", 0)) as fake, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(entered, "127.0.0.1", fake.getsockname()[1], 1, CHANNEL, KEY)
        connection, _ = fake.accept()
        with connection:
            connection.sendall(bytes(32))
            connection.recv(1)
            connection.sendall(bytes(32))
            with pytest.raises(ConfigError, match="does not know the secret"):
                coming.result()


def test_ranks_that_do_not_come_in_time_are_named():
    with Door("127.0.0.1", KEY) as door, pytest.raises(EngineDiedError, match="rank 1, 2, 3 of 4 has not come"):
        door.others(4, SHORT_S)
