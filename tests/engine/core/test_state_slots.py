"""Slots of states: each has one owner, whatever requests do, and a checkpoint holds what its block's end needs."""

import random

from kvstore.engine.core.state_slots import RequestState, StateSlots

SIZE = 4


class Device:
    """Slots with the tokens that their states have seen."""

    def __init__(self, slots: StateSlots) -> None:
        self.slots = slots
        self.seen: list[tuple[int, ...]] = [()] * slots.num_slots

    def step(self, computed: dict[str, tuple[RequestState, tuple[int, ...]]]) -> None:
        plan = self.slots.take_plan({name: state for name, (state, _) in computed.items()})
        for source, destination in plan.before:
            self.seen[destination] = self.seen[source]
        for name, (_, tokens) in computed.items():
            self.seen[plan.slots[name]] = tokens
        for source, destination in plan.after:
            self.seen[destination] = self.seen[source]


def chain(tokens: tuple[int, ...]) -> list[bytes]:
    """Its blocks' ids: what they contain."""
    return [repr(tokens[:end]).encode() for end in range(SIZE, len(tokens) + 1, SIZE)]


def test_any_order_of_events_leaves_every_checkpoint_right():
    for seed in range(60):
        rng = random.Random(seed)
        slots = StateSlots(rng.randint(2, 7))
        device, running = Device(slots), dict[str, tuple[RequestState, tuple[int, ...]]]()
        for step in range(80):
            event = rng.randrange(8)
            if event < 3:  # begins, maybe behind a checkpoint
                tokens = tuple(rng.randrange(2) for _ in range(rng.randrange(9)))
                found = [block for block in chain(tokens) if slots.has(block)]
                state = slots.begin(found[-1] if found else None)
                if state is not None:
                    begun = tokens[: (chain(tokens).index(found[-1]) + 1) * SIZE] if found else ()
                    running[f"{step}"] = (state, begun)
                    if begun:
                        device.step({})
                        assert device.seen[state.slot] == begun
            elif event == 3 and running:
                slots.end(running.pop(rng.choice(list(running)))[0])
            elif event == 4 and running:
                state, tokens = running[rng.choice(list(running))]
                if (other := slots.fork(state)) is not None:
                    running[f"{step} forked"] = (other, tokens)
            elif event == 5:
                slots.forget(rng.sample(known, 1) if (known := list(slots._checkpoints)) else [])
            for name, (state, tokens) in running.items():
                tokens = (*tokens, rng.randrange(2))
                running[name] = (state, tokens)
                if len(tokens) % SIZE == 0:
                    slots.keep(state, len(tokens))
            device.step(running)
            for state, tokens in running.values():
                assert device.seen[state.slot] == tokens
                slots.computed(state, len(tokens), chain(tokens), SIZE, rng.random() < 0.5)
                assert len(state.last) <= 2
            for block_id, slot in slots._checkpoints.items():
                assert repr(device.seen[slot]).encode() == block_id
            slots.check_integrity(state for state, _ in running.values())
        for state, _ in running.values():
            slots.end(state)
        slots.forget(list(slots._checkpoints))
        slots.check_integrity([])
        assert len(slots.take_stale()) == len([seen for seen in device.seen if seen])


def test_the_last_checkpoint_of_a_running_request_goes_to_no_other():
    """Else it would leave no state, if it ended then."""
    slots, chains = StateSlots(5), [[f"{name}{end}".encode() for end in range(9)] for name in "ab"]
    states = [state for state in (slots.begin(None), slots.begin(None)) if state is not None]
    for end in range(1, 10):
        for state in states:
            slots.keep(state, end * SIZE)
        slots.take_plan({})
        for state, chain_ in zip(states, chains, strict=True):
            slots.computed(state, end * SIZE, chain_, SIZE, False)
            assert slots.has(chain_[end - 1])
    assert slots.begin(None) is not None and slots.begin(None) is None
    slots.end(states.pop())
    assert slots.begin(None) is not None and slots.has(chains[0][-1])
