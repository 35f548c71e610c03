"""Transfers in queues of a device: what waits for what, what fails with what, and what is kept for how long."""

import gc
import itertools
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvstore.blocks.records import StatePiece, TransferPlan
from kvstore.memory.device_transfer import DeviceTransfer, Pace
from kvstore.memory.streams import CudaStreams, Queue
from tests.support.arenas import LOADS, NUM_LAYERS, ROW_STARTS, SAVES, SHAPES, SmallArena
from tests.support.simulated_streams import SimulatedStreams
from tests.support.waiting import TIMEOUT_S

PACE = Pace(layers_ahead=1)  # so that of three layers the last is launched in the middle of the forward
PIECES = (StatePiece(1, 0, 6), StatePiece(1, 1, 3))
EACH_LAYER = Pace(layers_ahead=1, group_bytes=1)


class Tape:
    """Streams that do everything at once and write down what they were asked for. Events are reached when told."""

    def __init__(self):
        self.log, self.events, self.holds = [], [], False

    def record(self, place):
        event = SimpleNamespace(name=f"{place.value} {len(self.events)}", place=place, is_reached=not self.holds)
        event.query = lambda: event.is_reached
        event.synchronize = lambda: None  # whoever waits goes on at once, even for an event that is not reached
        event.seconds_until = lambda end: 0.25
        self.events.append(event)
        self.log.append(f"record {place.value}")
        return event

    def wait(self, place, event):
        self.log.append(f"{place.value} waits for {event.place.value}")

    def launch(self, place, work):
        self.log.append(f"launch {place.value}")
        work()


class Part(SmallArena):
    """A `DeviceTransfer` over it."""

    def __init__(self, streams):
        self.streams, self.num_progress, self.progressed = streams, 0, threading.Condition()
        super().__init__(lambda arena: DeviceTransfer(arena, streams, self._progress, PACE))

    def _progress(self):
        with self.progressed:
            self.num_progress += 1
            self.progressed.notify_all()

    def begin(self, loads=LOADS, saves=SAVES, ticket=1):
        self.transfer.begin(TransferPlan(loads, saves, ticket), ROW_STARTS)

    def forward(self, layers=range(NUM_LAYERS)):
        for layer in layers:
            self.transfer.save_kv_layer(layer, *self.step[layer])
            self.transfer.wait_for_layer_load(layer)

    def settled(self, count=2):
        """The outcomes once so many have come; whoever waits is woken for each."""
        found = {}
        with self.progressed:
            assert self.progressed.wait_for(lambda: found.update(self.outcomes()) or len(found) == count, TIMEOUT_S)
        return found


@pytest.fixture
def tape():
    part = Part(Tape())
    part.streams.log.clear()
    part.streams.events.clear()
    yield part
    part.transfer.close()


@pytest.fixture
def part():
    streams = SimulatedStreams(3)
    part = Part(streams)
    yield part
    part.transfer.close()
    streams.close()


def states_of(part):
    """Two states, each of one and a half blocks."""
    states = torch.arange(2 * 3 * part.arena.layout.block_bytes // 2, dtype=torch.int64).to(torch.uint8).view(2, -1)
    part.arena.layout = replace(part.arena.layout, state_bytes=states.shape[1])
    rows = {"packed": states.__getitem__, "blank": lambda count: torch.empty_like(states[:count])}
    part.transfer.register(part.caches, SimpleNamespace(**rows, unpack=states.__setitem__))
    return states


def whole(part, states):
    """What is stored of the second one."""
    size = part.arena.layout.block_bytes
    return torch.cat([states[1], torch.zeros(size // 2, dtype=torch.uint8)]).view(2, size)


# -- what waits for what ---------------------------------------------------------------------------------------------
def test_every_wait_of_a_step_stands_where_it_must(tape):
    tape.begin()
    load = ["launch load", "record load"]
    assert tape.streams.log == ["record compute", "load waits for compute", "record load", *load]
    tape.streams.log.clear()
    tape.forward()
    waits = ["compute waits for load"]
    assert tape.streams.log == [*load, *waits, *load, *waits, *waits], "a small step is saved when it has ended"
    tape.streams.log.clear()
    tape.transfer.end()
    save = ["record compute", "save waits for compute", "launch save", "record save"]
    assert tape.streams.log == [*save, "record save", "record load", "compute waits for load"]


def test_what_could_change_a_state_waits_until_it_is_saved_and_what_needs_it_until_it_is_loaded(tape):
    states = states_of(tape)
    tape.streams.log.clear()
    tape.transfer.save_states(TransferPlan(ticket=5, states=PIECES))
    save = ["record compute", "save waits for compute", "launch save", "record save", "compute waits for save"]
    assert tape.streams.log == save and tape.outcomes() == {"save": True}
    assert torch.equal(tape.arena.rows[[6, 3]], whole(tape, states)), "nothing is left of what was there"
    tape.streams.log.clear()
    tape.transfer.begin(TransferPlan(LOADS, (), 6, (StatePiece(0, 0, 6), StatePiece(0, 1, 3))), ROW_STARTS)
    state = ["launch load", "record load", "compute waits for load"]
    assert tape.streams.log[:6] == ["record compute", "load waits for compute", *state, "record load"]
    assert torch.equal(states[0], states[1])


def test_a_state_that_cannot_be_saved_is_told(part):
    states_of(part)
    failing(part.streams, Queue.SAVE, 0)
    part.transfer.save_states(TransferPlan(ticket=5, states=PIECES))
    assert part.settled(1) == {"save": False}
    part.transfer.save_states(TransferPlan(ticket=6, states=PIECES))
    assert part.settled(1) == {"save": True}


def test_the_memory_of_a_state_that_was_saved_in_part_is_its_own_until_its_copies_have_ended(tape):
    states_of(tape)
    tape.streams.log.clear()
    tape.transfer.save_states(TransferPlan(ticket=5, states=(*PIECES, StatePiece(99, 0, 5))))  # there is no such row
    assert "record save" in tape.streams.log, "its end is awaited"
    assert tape.outcomes() == {"save": False}


def test_the_first_layers_are_loaded_by_one_launch_before_the_forward(tape):
    """All layers before it would cost a long model's first token a millisecond; the rest go in between."""
    tape.transfer.pace = Pace(layers_ahead=2)
    tape.begin(saves=())
    assert tape.streams.log.count("launch load") == 1
    tape.transfer.wait_for_layer_load(0)
    assert tape.streams.log[-3:] == ["launch load", "record load", "compute waits for load"]
    tape.forward()
    tape.transfer.end()
    assert tape.streams.log.count("launch load") == 2
    assert all(tape.landed())


@pytest.mark.parametrize("num_layers", range(NUM_LAYERS + 1))
def test_what_a_forward_did_not_ask_for_is_loaded_at_its_end(part, num_layers):
    """Its HBM blocks are in the map as if they held it."""
    part.begin(saves=())
    part.forward(range(num_layers))
    part.transfer.end()
    assert part.settled(1) == {"load": True}
    assert all(part.landed())


def test_a_large_step_is_saved_layer_by_layer(tape):
    tape.transfer.pace = EACH_LAYER
    tape.begin(loads=())
    tape.forward()
    save = ["record compute", "save waits for compute", "launch save", "record save"]
    assert tape.streams.log == save * 3
    fence = tape.transfer.end()
    assert tape.has_saved()
    tape.streams.log.clear()
    fence.order()
    assert tape.streams.log == ["compute waits for save"]


def test_a_step_without_saves_has_no_fence(tape):
    tape.begin(saves=())
    tape.forward()
    assert tape.transfer.end() is None
    assert tape.outcomes() == {"load": True}
    assert tape.transfer.end() is None and tape.outcomes() == {}


def test_what_is_moved_is_what_the_twins_move(part):
    part.begin()
    part.forward()
    part.transfer.end()
    assert part.settled() == {"load": True, "save": True}
    assert all(part.landed())
    assert part.has_saved()


def test_a_load_takes_so_many_times_as_long_as_its_first_layer(tape):
    """What is launched later may have waited for the host: it says nothing of how fast the bus is."""
    tape.begin(saves=())
    tape.transfer.end()
    (done,) = tape.transfer.completed()
    assert (done.seconds, done.num_bytes) == (3 * 0.25, 2 * tape.arena.layout.block_bytes)
    assert tape.transfer.load_seconds.as_dict()["sum"] == 0.75


# -- what is kept for how long ---------------------------------------------------------------------------------------
def test_tensors_are_kept_until_their_save_has_ended_and_no_longer(tape):
    tape.streams.holds = True
    tape.begin()
    tape.forward()
    kept = [weakref.ref(tensor) for pair in tape.step for tensor in pair]
    tape.step = []
    tape.transfer._streams.launch = lambda place, work: None  # the device has not begun
    tape.transfer.end()
    *_, saved, _, _ = tape.streams.events
    gc.collect()
    tape.transfer.completed()
    assert all(ref() is not None for ref in kept)
    saved.is_reached = True
    tape.transfer.completed()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


def test_nothing_is_ready_before_its_last_event(tape):
    tape.streams.holds = True
    tape.begin()
    tape.forward()
    tape.transfer.end()
    *before, last = [event for event in tape.streams.events if event.place is Queue.SAVE]
    for event in before:
        event.is_reached = True
    assert tape.outcomes() == {}
    last.is_reached = True
    assert tape.outcomes() == {"save": True}
    for event in tape.streams.events:
        event.is_reached = True
    assert tape.outcomes() == {"load": True}


def test_beyond_the_limit_the_computation_waits_for_the_oldest_save(tape):
    """Of one step, too: the host is through with it before the device has begun."""
    size = 9 * sum(SHAPES[0].widths) * 4
    tape.transfer.pace = Pace(1, group_bytes=1, max_save_bytes=2 * size)
    tape.streams.holds = True
    tape.begin(loads=())
    tape.forward()
    first = weakref.ref(tape.step.pop(0)[0])
    gc.collect()
    kept = [weakref.ref(key) for key, _ in tape.step]
    tape.step = []
    gc.collect()
    assert tape.streams.log.count("compute waits for save") == 1 and first() is None
    assert all(ref() is not None for ref in kept)


def test_saves_are_given_up_while_too_much_that_exists_waits(tape):
    tape.transfer.pace = Pace(1, group_bytes=1, max_save_bytes=1 << 12)
    tape.streams.holds = True
    assert tape.transfer.can_save
    tape.begin(loads=())
    tape.forward()
    assert tape.transfer.can_save, "nothing of it has been computed yet"
    for event in tape.streams.events:
        event.is_reached = event.place is Queue.COMPUTE
    assert not tape.transfer.can_save
    for event in tape.streams.events:
        event.is_reached = True
    tape.transfer.completed()
    assert tape.transfer.can_save


# -- failures --------------------------------------------------------------------------------------------------------
def failing(streams, place, number):
    """The launch of this number in this queue raises."""
    counter = itertools.count()

    def fail(queue):
        if queue is place and next(counter) == number:
            raise MemoryError("injected")

    streams.fail_launch = fail


@pytest.mark.parametrize("number", range(NUM_LAYERS))
def test_a_load_that_cannot_be_launched_fails_at_the_end_of_its_step(part, number):
    failing(part.streams, Queue.LOAD, number)
    part.begin()
    part.forward()
    part.transfer.end()
    found = part.outcomes()
    assert found.pop("load") is False, "known when the step has ended"
    part.begin(loads=LOADS, saves=(), ticket=2)
    part.forward()
    part.transfer.end()
    assert part.settled(1 if found else 2) | found == {"load": True, "save": True}
    assert all(part.landed())


@pytest.mark.parametrize("number", range(NUM_LAYERS))
def test_a_save_that_cannot_be_launched_fails_alone(part, number):
    part.transfer.pace = EACH_LAYER
    failing(part.streams, Queue.SAVE, number)
    part.begin()
    part.forward()
    part.transfer.end()
    assert part.settled() == {"load": True, "save": False}
    assert all(part.landed())
    part.begin(loads=(), ticket=2)
    part.forward()
    part.transfer.end()
    assert part.settled(1) == {"save": True}
    assert part.has_saved()


@pytest.mark.parametrize("num_layers", range(NUM_LAYERS + 1))
def test_a_forward_that_raised_leaves_nothing_behind(part, num_layers):
    """Its HBM blocks and its arena blocks are given to others at once."""
    part.transfer.pace = EACH_LAYER
    part.begin()
    part.forward(range(num_layers))
    part.transfer.end(succeeded=False)
    for key_cache, _ in part.caches:
        key_cache.fill_(5.0)
    part.arena.tensor.fill_(6.0)
    assert part.outcomes() == {"load": True, "save": False}
    part.streams.synchronize()
    assert all(bool((key_cache == 5.0).all()) for key_cache, _ in part.caches)
    assert bool((part.arena.tensor == 6.0).all())


@pytest.mark.parametrize("number", range(NUM_LAYERS))
def test_a_beginning_that_was_interrupted_leaves_nothing_behind(part, number):
    calls, launch = itertools.count(), part.streams.launch

    def interrupted(place, work):
        if next(calls) == number:
            raise KeyboardInterrupt
        launch(place, work)

    part.streams.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        part.begin()
        part.forward()
    part.transfer.end(succeeded=False)
    before = [key_cache.clone() for key_cache, _ in part.caches]
    part.streams.synchronize()
    assert all(torch.equal(*both) for both in zip(before, (key for key, _ in part.caches), strict=True))
    assert part.outcomes() == {"load": False} | ({"save": False} if number else {})


@pytest.mark.parametrize("place", [Queue.LOAD, Queue.SAVE, Queue.COMPUTE])
def test_a_device_that_fails_ends_everything(part, place):
    def fail():
        raise RuntimeError("injected")

    part.begin()
    part.forward(range(1))
    part.streams.launch(place, fail)
    part.transfer.save_kv_layer(1, *part.step[1])
    saved = weakref.ref(part.step.pop(1)[0])
    with pytest.raises(RuntimeError, match="device has failed"):
        part.streams.synchronize()
    part.transfer.end()
    assert part.outcomes() == {"load": False, "save": False}
    gc.collect()
    assert part.transfer.can_save and saved() is None
    with pytest.raises(RuntimeError, match="device has failed"):
        part.streams.launch(place, fail)
    part.begin(ticket=2)
    part.transfer.end(succeeded=False)
    assert part.outcomes() == {"load": False, "save": False}


def test_whoever_waits_is_woken_when_the_device_fails(part):
    go = threading.Event()

    def fail():
        go.wait(TIMEOUT_S)
        raise RuntimeError("injected")

    part.streams.launch(Queue.SAVE, fail)
    part.begin()
    part.forward()
    part.transfer.end()
    go.set()
    assert part.settled()["save"] is False


def test_close_waits_for_what_is_in_flight(part):
    *_, watcher = [thread for thread in threading.enumerate() if thread.name == "kvstore-transfers"]
    for ticket in range(5):
        part.begin(ticket=ticket)
        part.forward()
        part.transfer.end()
    part.begin(ticket=5)
    part.transfer.close()
    ended = [(done.ticket, done.is_load, done.succeeded) for done in part.transfer.completed()]
    expected = [(ticket, is_load, True) for ticket in range(5) for is_load in (False, True)]
    assert sorted(ended) == [*expected, (5, False, False), (5, True, True)]
    assert not watcher.is_alive()


# -- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_streams_of_cuda_keep_the_order_that_is_asked_for():
    streams = CudaStreams(torch.device("cuda"))
    tensor = torch.zeros(1 << 20, device="cuda")
    start = streams.record(Queue.SAVE)
    streams.launch(Queue.SAVE, lambda: (torch.cuda._sleep(100_000_000), tensor.fill_(1.0)))
    end = streams.record(Queue.SAVE)
    assert not end.query()
    streams.wait(Queue.COMPUTE, end)
    assert float(tensor.sum()) == 1 << 20
    end.synchronize()
    assert end.query() and start.seconds_until(end) > 0.01
