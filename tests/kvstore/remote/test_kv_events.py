"""KV events on the wire: read by a reader written from their schema, by vLLM's own classes, late, and after losses."""

import importlib.util
import threading
import time

import msgspec
import pytest
import zmq

from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import child_block_id, token_bytes
from kvstore.blocks.records import BlockRecord
from kvstore.remote.kv_events import KVEvents, PastBatches
from tests.support.kv_reader import Reader, free_endpoint
from tests.support.waiting import TIMEOUT_S, wait_until

TOPIC = "kv@pod@org/model"


def root_of(tenant: str) -> bytes:
    return tenant.encode().ljust(32, b".")


class Server:
    """Tiers of chains that say where they are, and their publisher."""

    def __init__(self, on_disk=(), endpoint: str | None = None, **options) -> None:
        self.endpoint = endpoint or free_endpoint()
        self.holdings = Holdings(root_of, on_disk)
        self.events = KVEvents(self.endpoint, TOPIC, **{"picture_every_s": 0.0, **options})

    def __enter__(self):
        self.events.start(self.holdings)
        return self

    def __exit__(self, *_):
        self.events.close()

    def store(self, tokens: list[int], place: int = Place.HBM, tenant: str = "") -> list[bytes]:
        """A chain of blocks of two tokens; returns their ids."""
        for one in chain(tokens, tenant):
            self.holdings.stored_record(place, one)
        return [one.block_id for one in chain(tokens, tenant)]


def chain(tokens: list[int], tenant: str = "") -> list[BlockRecord]:
    found, parent = [], root_of(tenant)
    for start in range(0, len(tokens), 2):
        packed = token_bytes(tokens[start : start + 2])
        found.append(BlockRecord(child_block_id(parent, packed), parent, packed, b"f" * 32, tenant))
        parent = found[-1].block_id
    return found


def prefixes(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(2, len(tokens) + 1, 2)}


def test_a_reader_knows_by_token_ids_what_each_tier_holds():
    with Server() as server, Reader(server.endpoint) as reader:
        ids = server.store([1, 2, 3, 4, 5, 6])
        server.store([1, 2, 3, 4], Place.CPU)
        server.store([1, 2], Place.DISK)
        picture = reader.pictures[TOPIC]
        reader.read_until(lambda: picture.held("STORAGE"))
        assert picture.held("GPU") == prefixes([1, 2, 3, 4, 5, 6])
        assert picture.held("CPU") == prefixes([1, 2, 3, 4]) and picture.held("STORAGE") == prefixes([1, 2])
        server.holdings.gone(Place.HBM, ids[2])
        server.holdings.gone(Place.CPU, ids[1])
        server.holdings.gone(Place.DISK, ids[0])
        reader.read_until(lambda: not picture.held("STORAGE"))
        assert (picture.held("GPU"), picture.held("CPU")) == (prefixes([1, 2, 3, 4]), prefixes([1, 2]))
        assert set(reader.pictures) == {TOPIC} and not picture.unplaced


def test_the_messages_are_three_frames_and_leave_defaults_out():
    server = Server()
    (one, two) = server.store([1, 2, 3, 4])  # before it begins, so that both go into one message
    with server:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.connect(server.endpoint)
        socket.subscribe(b"kv@")
        messages = []
        while not messages or b"BlockStored" not in messages[-1][2]:
            assert socket.poll(1000 * TIMEOUT_S)
            messages.append(socket.recv_multipart())
        context.destroy(linger=0)
    assert [topic for topic, _, _ in messages] == [TOPIC.encode()] * len(messages)
    numbers = [int.from_bytes(sequence, "big") for _, sequence, _ in messages]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    told, events = msgspec.msgpack.decode(messages[-1][2])
    assert abs(told - time.time()) < 600 and events == [
        {
            "type": "BlockStored", "block_hashes": [one, two], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
            "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None,
        }
    ]  # fmt: skip


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
def test_vllms_own_classes_decode_them():
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    server = Server()
    (one, two) = server.store([1, 2, 3, 4], Place.DISK)  # before it begins, so that both go into one message
    with server, Reader(server.endpoint) as reader:
        reader.read_until(lambda: reader.pictures[TOPIC].held("STORAGE"))
        server.holdings.gone(Place.DISK, two)
        reader.read_until(lambda: len(reader.pictures[TOPIC].held("STORAGE")) == 1)
        payloads = [payload for _, payload in reader.replay(0)]
    batches = [msgspec.msgpack.decode(payload, type=KVEventBatch) for payload in payloads]
    events = [event for batch in batches for event in batch.events]
    stored = BlockStored(
        block_hashes=[one, two], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2, lora_id=None,
        medium="STORAGE", lora_name=None,
    )  # fmt: skip
    removed = BlockRemoved(block_hashes=[two], medium="STORAGE")
    assert [event for event in events if not isinstance(event, AllBlocksCleared)][-2:] == [stored, removed]
    assert isinstance(events[0], AllBlocksCleared) and batches[0].data_parallel_rank is None


def test_what_a_reader_missed_is_repeated():
    with Server() as server, Reader(server.endpoint) as reader:
        for token in range(5):
            server.store([token, token])
            reader.read_until(lambda token=token: (token, token) in reader.pictures[TOPIC].held("GPU"))
        sequences = reader.pictures[TOPIC].sequences
        past = reader.replay(sequences[-2])
        assert [sequence for sequence, _ in past] == sequences[-2:]
        assert reader.replay(sequences[-1] + 1) == []
        everything = reader.replay(0)
        assert [sequence for sequence, _ in everything] == list(range(sequences[-1] + 1))


def test_who_asks_for_what_is_not_kept_any_more_gets_the_whole_picture():
    with Server(past=PastBatches(most=2)) as server, Reader(server.endpoint) as reader:
        picture = reader.pictures[TOPIC]
        for token in range(5):
            server.store([token, token])
            reader.read_until(lambda token=token: (token, token) in picture.held("GPU"))
        cleared = picture.num_cleared
        picture.places.clear()  # what it had missed
        assert len(reader.replay(0)) == 2
        reader.read_until(lambda: picture.num_cleared > cleared and len(picture.held("GPU")) == 5)
        assert picture.held("GPU") == {(token, token) for token in range(5)}


def test_so_does_who_asks_for_a_topic_of_which_nothing_is_kept_any_more():
    with Server(past=PastBatches(most=2)) as server, Reader(server.endpoint) as reader:
        of_ada = reader.pictures["kv@pod@ada:org/model"]
        server.store([7, 7], tenant="ada")
        reader.read_until(lambda: of_ada.held("GPU"))
        for token in range(3):
            server.store([token, token])
            reader.read_until(lambda token=token: (token, token) in reader.pictures[TOPIC].held("GPU"))
        of_ada.places.clear()  # what it had missed
        assert reader.replay(0, b"kv@pod@ada:org/model") == []
        reader.read_until(lambda: of_ada.held("GPU") == {(7, 7)})
        cleared = of_ada.num_cleared
        assert reader.replay(of_ada.sequences[-1] + 1, b"kv@pod@ada:org/model") == reader.replay(0, b"nobody") == []
        server.store([8, 8], tenant="ada")
        reader.read_until(lambda: (8, 8) in of_ada.held("GPU"))
        assert of_ada.num_cleared == cleared, "it lacked nothing"


def test_past_batches_are_bounded_in_number_and_bytes():
    past = PastBatches(most=3, most_bytes=100)
    for sequence in range(5):
        past.add(b"t", sequence, b"x")
    assert [sequence for sequence, _ in past.since(b"t", 0)] == [2, 3, 4]
    past.add(b"t", 5, b"x" * 99)
    assert [sequence for sequence, _ in past.since(b"t", 0)] == [4, 5]
    past.add(b"t", 6, b"x" * 200)
    assert past.since(b"t", 0) == []


def test_a_reader_that_comes_late_gets_what_is_held():
    with Server() as server:
        server.store([1, 2, 3, 4])
        ids = server.store([1, 2, 5, 6])
        server.store([1, 2, 5, 6], Place.CPU)
        wait_until(lambda: not server.holdings.num_waiting)
        server.holdings.gone(Place.HBM, ids[1])
        with Reader(server.endpoint) as reader:
            picture = reader.pictures[TOPIC]
            reader.read_until(lambda: picture.held("GPU") and picture.held("CPU"))
            assert picture.held("GPU") == prefixes([1, 2, 3, 4]) and picture.held("CPU") == prefixes([1, 2, 5, 6])
            assert not picture.unplaced


def test_after_a_restart_a_reader_is_told_what_is_on_disk_and_loses_the_rest():
    endpoint = free_endpoint()
    with Reader(endpoint) as reader:
        picture = reader.pictures[TOPIC]
        with Server(endpoint=endpoint) as server:
            server.store([1, 2, 3, 4])
            server.store([1, 2], Place.DISK)
            server.store([9, 9], Place.CPU, tenant="ada")
            reader.read_until(lambda: picture.held("STORAGE") and len(reader.pictures) == 2)
        on_disk = [*chain([1, 2]), *chain([9, 9], "ada")]
        with Server(on_disk=reversed(on_disk), endpoint=endpoint):
            of_ada = reader.pictures["kv@pod@ada:org/model"]
            reader.read_until(lambda: not picture.held("GPU") and picture.held("STORAGE") and of_ada.held("STORAGE"))
            assert picture.held("STORAGE") == {(1, 2)}
            assert (of_ada.held("CPU"), of_ada.held("STORAGE")) == (set(), {(9, 9)})


def test_tenants_have_topics_and_sequences_of_their_own():
    with Server() as server, Reader(server.endpoint, "kv@pod@ada:") as reader, Reader(server.endpoint) as router:
        server.store([1, 1])
        server.store([2, 2], tenant="ada")
        server.store([3, 3], tenant="a@b:c")
        topics = {TOPIC, "kv@pod@ada:org/model", "kv@pod@a%40b%3Ac:org/model"}
        router.read_until(lambda: set(router.pictures) == topics)
        router.read_until(lambda: all(one.held("GPU") for one in router.pictures.values()))
        assert [sorted(router.pictures[topic].held("GPU")) for topic in sorted(topics)] == [
            [(3, 3)], [(2, 2)], [(1, 1)]
        ]  # fmt: skip
        for picture in router.pictures.values():
            first = picture.sequences[0]
            assert picture.sequences == list(range(first, first + len(picture.sequences)))
        reader.read_until(lambda: reader.pictures["kv@pod@ada:org/model"].held("GPU"))
        assert set(reader.pictures) == {"kv@pod@ada:org/model"}
        own = reader.replay(0, b"kv@pod@ada:org/model")
        assert own and all(b"\x02\x02" in payload or b"Cleared" in payload for _, payload in own)


def test_under_load_nothing_is_lost_and_parents_come_first():
    """Writers on several threads, which never wait for the reader; and readers that come and go meanwhile."""
    with Server() as server, Reader(server.endpoint) as reader:

        def write(writer: int) -> None:
            for talk in range(60):
                tokens = [writer, talk, *range(40)]
                ids = server.store(tokens, tenant=str(writer % 2))
                server.store(tokens[:20], Place.CPU, tenant=str(writer % 2))
                if talk % 3 == 0:
                    for one in reversed(ids):
                        server.holdings.gone(Place.HBM, one)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with Reader(server.endpoint) as other:
                other.read_until(lambda other=other: other.pictures)
            reader.read()
        wait_until(lambda: not server.holdings.num_waiting)
        for tenant in ("0", "1"):
            talks = [
                [writer, talk, *range(40)] for writer in range(4) for talk in range(60) if writer % 2 == int(tenant)
            ]
            in_hbm = set().union(*(prefixes(one) for one in talks if one[1] % 3))
            in_cpu = set().union(*(prefixes(one[:20]) for one in talks))
            picture = reader.pictures[f"kv@pod@{tenant}:org/model"]
            reader.read_until(lambda p=picture, a=in_hbm, b=in_cpu: p.held("GPU") == a and p.held("CPU") == b)
            assert picture.sequences == list(range(picture.sequences[0], picture.sequences[-1] + 1))
            assert not picture.unplaced


def test_bad_requests_for_a_replay_are_counted_and_do_no_harm():
    with Server() as server, Reader(server.endpoint) as reader:
        for frames in ([b"", b"short"], [b""], [b"", b"x" * 8, b"t", b"more"]):
            reader.ask(frames)
        wait_until(lambda: server.events.stats()["bad_replay_requests"] == 3)
        server.store([1, 2])
        reader.read_until(lambda: reader.pictures[TOPIC].held("GPU"))
