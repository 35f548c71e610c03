"""The blocks of one simulated server: where each is after requests that are carried out by hand, one at a time."""

import pytest

from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Transferred
from kvstore.planning.replay_config import ReplayConfig, ServiceModel
from kvstore.planning.server_blocks import ServerBlocks
from kvstore.planning.traces import TraceRequest
from kvstore.planning.virtual_io import VirtualClock
from kvstore.policy.policies import Steering
from kvstore.store.seam import Lookup
from tests.support.small_traces import SIZE, request


class Server:
    """It serves one request after the other, each in a second."""

    def __init__(self, hbm=100, cpu=0, disk=0, look_ahead=True, ttl_s=None, policy="lru", write_bytes_per_s=1e9):
        service = ServiceModel(max_batch=1, read_bytes_per_s=1e9, write_bytes_per_s=write_bytes_per_s)
        self.clock = VirtualClock()
        self.config = ReplayConfig(hbm, cpu, disk, 1, policy, look_ahead, service, ttl_s)
        self.blocks = ServerBlocks(self.config, SIZE, 10, self.clock, None, lambda rank: None)
        self.num_served = 0

    def settle(self):
        """Until nothing is read or written any more."""
        self.clock.run()
        if (store := self.blocks.store) is not None:
            store.poll()
            while not self.blocks.is_idle:
                self.clock.run()
                store.poll()

    def arrive(self, one: TraceRequest):
        job = self.blocks.job(self.num_served, self.num_served, one)
        self.num_served += 1
        self.settle()
        return job

    def start(self, job) -> int:
        """Take its blocks and load what is below HBM. Returns how many hits were in HBM."""
        blocks, one = self.blocks, job.request
        hits = blocks.match(job.chain, one.num_tokens)
        found = blocks.match_below(job, hits)
        while found.lookup is Lookup.PENDING:
            self.settle()
            found = blocks.match_below(job, hits)
        num_loads = found.num_tokens // SIZE
        total = -(-(one.num_tokens + one.num_output_tokens) // SIZE)
        blocks.allocate(job, hits, total - len(hits), num_loads)
        ticket = blocks.load(job, num_loads)
        if ticket is not None:
            blocks.transferred(Transferred(ticket, True, True, num_loads, 0.0))
            blocks.store.poll()
        return len(hits)

    def serve(self, one: TraceRequest):
        """Returns its job, and how many hits were in HBM when it started."""
        job = self.arrive(one)
        num_hbm = self.start(job)
        self.blocks.computed(job, job.num_hit * SIZE, one.num_tokens)
        self.settle()
        self.blocks.end(job)
        self.clock.now_s += 1
        self.settle()
        return job, num_hbm

    def moved(self, *names: str) -> tuple[int, ...]:
        found = self.blocks.moved()
        return tuple(found[name] for name in names)


def test_one_token_is_always_left_to_compute():
    server = Server()
    server.serve(request([1, 2, 3], 30))
    chain = [1, 2, 3, 4]
    assert [len(server.blocks.match(chain, n)) for n in (10, 11, 20, 30, 31, 41)] == [0, 1, 1, 2, 3, 3]
    assert server.blocks.match([1, 9, 3], 31) == server.blocks.match([1], 11)
    server.blocks.check_integrity()


def test_without_tiers_below_hits_are_in_hbm_alone():
    server = Server(hbm=3)
    assert server.blocks.store is None
    server.serve(request([1, 2], 21))
    job, num_hbm = server.serve(request([1, 2, 3], 30))
    assert (job.arrival, job.schedule, num_hbm, job.num_hit) == (["hbm"] * 2, ["hbm"] * 2, 2, 2)
    assert server.blocks.num_held(request([1, 2, 3, 4])) == (3, 0)
    server.serve(request([7, 8, 9], 30))
    assert server.moved("hbm", "save", "unsaved") == (3, 0, 0)
    server.blocks.check_integrity()


def test_what_was_evicted_from_hbm_is_loaded_from_the_cpu_tier():
    server = Server(hbm=4, cpu=20)
    server.serve(request([1, 2, 3], 31))
    server.serve(request([7, 8, 9], 31))
    assert server.blocks.num_held(request([1, 2, 3])) == (0, 3)
    job, num_hbm = server.serve(request([1, 2, 3], 31))
    assert (job.arrival, job.schedule, num_hbm, job.num_hit) == (["cpu"] * 3, ["cpu"] * 3, 0, 3)
    assert server.moved("save", "load", "write", "read", "hbm") == (6, 3, 0, 0, 6)
    server.blocks.check_integrity()


@pytest.mark.parametrize("look_ahead", [True, False])
def test_what_is_on_disk_is_read_when_it_arrives_or_when_it_could_start(look_ahead):
    server = Server(hbm=4, cpu=4, disk=50, look_ahead=look_ahead)
    server.serve(request([1, 2, 3], 31))
    server.serve(request([6, 7, 8, 9], 40))
    server.serve(request([1, 10], 21))
    server.serve(request([6, 7, 8], 31))
    reads = server.moved("read")
    job, _ = server.serve(request([1, 2, 3], 31))
    assert job.num_hit == 3 and "disk" in job.arrival
    assert ("disk" in job.schedule) is not look_ahead
    assert server.moved("read") > reads
    server.blocks.check_integrity()


@pytest.mark.parametrize("cpu", [0, 50])
def test_an_answer_is_known_with_its_full_blocks(cpu):
    server = Server(cpu=cpu)
    server.serve(request([1, 2, 3], 15, 18, has_answer=True))
    assert server.blocks.num_held(request([1, 2, 3, 4])) == (3, 3 if cpu else 0)
    server.serve(request([5, 6, 7], 15, 18))
    assert server.blocks.num_held(request([5, 6, 7, 8])) == (1, 1 if cpu else 0), "nobody knows this one's answer"


def test_blocks_from_a_shared_tier_land_in_the_cpu_tier_as_far_as_there_is_room():
    server = Server(hbm=4, cpu=3)
    one = request([1, 2, 3, 4, 5])
    assert server.blocks.land(one, 0, 2) == 2
    assert server.blocks.num_held(one) == (0, 2)
    assert server.blocks.land(one, 1, 5) == 2, "one is here already, and there is room for one more"
    assert server.blocks.num_held(one) == (0, 3)
    server.blocks.check_integrity()


def test_what_lands_is_written_to_disk():
    server = Server(hbm=4, cpu=2, disk=50)
    for first in range(0, 6, 2):
        assert server.blocks.land(request([1, 2, 3, 4, 5, 6]), first, first + 2) == 2
        server.settle()
    assert server.moved("write", "save", "read") == (6, 0, 0)
    assert server.blocks.num_held(request([1, 2, 3, 4, 5, 6])) == (0, 6)
    server.blocks.check_integrity()


@pytest.mark.parametrize("keeps_disk", [True, False])
def test_a_restart_keeps_at_most_the_disk(keeps_disk):
    server = Server(hbm=4, cpu=20, disk=50)
    server.serve(request([1, 2, 3], 31))
    server.blocks.evict_all(keeps_disk)
    server.settle()
    assert server.blocks.num_held(request([1, 2, 3])) == (0, 3 if keeps_disk else 0)
    job, _ = server.serve(request([1, 2, 3], 31))
    assert job.arrival == (["disk"] * 3 if keeps_disk else [])
    assert server.moved("disk", "cpu", "hbm") == ((0, 3, 3) if keeps_disk else (3, 3, 3))
    server.blocks.check_integrity()


def test_a_restart_of_a_server_without_tiers_below():
    server = Server(hbm=4)
    server.serve(request([1, 2, 3], 31))
    server.blocks.evict_all(keeps_disk=True)
    assert server.blocks.num_held(request([1, 2, 3])) == (0, 0)


def test_blocks_that_a_request_still_holds_are_no_end():
    server = Server(hbm=4, cpu=20)
    job = server.arrive(request([1, 2], 21))
    server.start(job)
    with pytest.raises(AssertionError):
        server.blocks.check_integrity()
    server.blocks.end(job)
    server.settle()
    server.blocks.check_integrity()


def test_a_steering_may_be_given():
    asked = []

    def steering(clock, sizes):
        asked.append((clock, dict(sizes)))
        return Steering("fifo", clock, sizes)

    clock = VirtualClock()
    config = ReplayConfig(3, 4, 5, 1)
    blocks = ServerBlocks(config, SIZE, 10, clock, steering, lambda rank: None)
    assert asked == [(clock, {"hbm": 3, "cpu": 4, "disk": 5})]
    assert isinstance(blocks.pool, BlockPool) and blocks.pool.num_free == 3
