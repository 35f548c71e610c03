"""How ranks of other machines come in: with the secret, in time, each to its place; and what they hear otherwise."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge

import pytest

from kvstore.engine.ranks.launch import Door, entered
from kvstore.errors import ConfigError, EngineDiedError

KEY, OTHER = b"k" * 32, b"o" * 32
ENOUGH_S, SHORT_S = 60.0, 0.2


def come(door: Door, rank: int, key: bytes = KEY) -> socket.socket:
    return entered(door.host, door.port, rank, key)


def test_each_rank_gets_its_place():
    with Door("127.0.0.1", KEY) as door, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(door.others, 3, ENOUGH_S)
        theirs = {rank: come(door, rank) for rank in (2, 1)}
        ours = waiting.result()
        assert sorted(ours) == [1, 2]
        for rank, end in theirs.items():
            end.sendall(bytes([rank]))
            assert ours[rank].recv(2) == bytes([rank])
            end.close()
            ours[rank].close()


def test_another_secret_is_told_to_both():
    with Door("127.0.0.1", KEY) as door, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(door.others, 2, 8.0)
        with pytest.raises(ConfigError, match=r"rank 1: the first rank at 127\.0\.0\.1 port \d+ has another secret"):
            come(door, 1, OTHER)
        with pytest.raises(EngineDiedError, match=r"rank 1 of 2 has not come .* 1 connections did not know the secret"):
            waiting.result()


@pytest.mark.parametrize("known", [OTHER, KEY + b"other" + bytes([0, 1])], ids=["none", "what another rank proves"])
def test_who_listens_must_know_the_secret_too(known):
    """A rank tells nothing to one that does not, and one that has other ranks prove it does not."""
    with socket.create_server(("127.0.0.1", 0)) as fake, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(entered, "127.0.0.1", fake.getsockname()[1], 1, KEY)
        accepted, _ = fake.accept()
        with accepted, Connection(os.dup(accepted.fileno())) as connection:
            assert connection.recv_bytes() == bytes([0, 1])
            connection.send_bytes(b"#CHALLENGE#" + bytes(20))
            connection.recv_bytes()
            connection.send_bytes(b"#WELCOME#")
            with pytest.raises(AuthenticationError):
                answer_challenge(connection, known)
            with pytest.raises(ConfigError, match="does not know the secret"):
                coming.result()


def test_the_proof_of_one_rank_lets_no_other_in():
    with Door("127.0.0.1", KEY) as door, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(door.others, 2, 8.0)
        with socket.create_connection((door.host, door.port)) as raw, Connection(os.dup(raw.fileno())) as connection:
            connection.send_bytes(bytes([0, 1]))
            with pytest.raises(AuthenticationError):
                answer_challenge(connection, KEY + b"other" + bytes([0, 2]))
        with pytest.raises(EngineDiedError, match=r"rank 1 of 2 has not come .* 1 connections did not know the secret"):
            waiting.result()


def test_ranks_that_do_not_come_in_time_are_named():
    with Door("127.0.0.1", KEY) as door, pytest.raises(EngineDiedError, match="rank 1, 2, 3 of 4 has not come"):
        door.others(4, SHORT_S)
