"""The persistent batch: slots, rows that join and leave in place, and the arrays of a step against a naive build."""

import random
from types import SimpleNamespace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.engine.core.input_batch import InputBatch, StepInputs, slot_mapping
from kvstore.engine.core.kv_cache_manager import Allocation
from kvstore.engine.core.scheduler import Scheduled

NOTHING_NEW = Allocation(0, ())


def step(name: str, start: int, count: int, samples: int = 1, allocation: Allocation = NOTHING_NEW) -> Scheduled:
    return Scheduled(name, start, count, samples, allocation)


def test_slots_beyond_32_bits_do_not_overflow():
    table = np.array([[2**30]], dtype=np.int32)
    assert slot_mapping(table, np.array([0]), np.array([5]), 16).tolist() == [2**34 + 5]


def naive_build(rows: list[str], tokens: dict, tables: dict, scheduled: tuple, size: int) -> StepInputs:
    """Token by token."""
    order = [i for i, s in enumerate(scheduled) if s.num_tokens == 1]
    order += [i for i, s in enumerate(scheduled) if s.num_tokens != 1]
    token_ids, positions, slots, starts, lens, samples, sample_rows = [], [], [], [0], [], [], []
    for i in order:
        s = scheduled[i]
        for position in range(s.num_computed_tokens, s.num_computed_tokens + s.num_tokens):
            token_ids.append(tokens[s.request_id][position])
            positions.append(position)
            slots.append(tables[s.request_id][position // size] * size + position % size)
        starts.append(len(positions))
        lens.append(s.num_computed_tokens + s.num_tokens)
        if s.num_samples:
            samples.append(len(positions) - 1)
            sample_rows.append(rows.index(s.request_id))
    own = [rows.index(scheduled[i].request_id) for i in order]
    return StepInputs(*map(np.array, (token_ids, positions, slots, starts, lens, own, samples, sample_rows, order)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 16]))
def test_built_arrays_equal_a_naive_build(seed, block_size):
    rng = random.Random(seed)
    window, seqs = 50, 6
    batch = InputBatch(seqs, window, block_size)
    rows: list[str] = []
    tokens: dict[str, list[int]] = {}
    tables: dict[str, list[int]] = {}
    for i in range(40):
        if rows and rng.random() < 0.3:
            name = rng.choice(rows)
            hole, last = batch.remove(name)
            assert (hole, last) == (rows.index(name), len(rows) - 1)
            rows[hole] = rows[last]
            rows.pop()
        elif len(rows) < seqs and rng.random() < 0.6:
            name = f"r{i}"
            tokens[name] = [rng.randrange(500) for _ in range(rng.randrange(1, window))]
            tables[name] = [rng.randrange(1000) for _ in range(-(-len(tokens[name]) // block_size))]
            rows.append(name)
            request = SimpleNamespace(request_id=name, token_ids=tokens[name], block_numbers=tables[name])
            assert batch.join(request) == len(rows) - 1
        chosen = rng.sample(rows, rng.randrange(len(rows) + 1))
        if not chosen:
            continue
        scheduled = []
        for name in chosen:
            start = rng.randrange(len(tokens[name]))
            count = rng.choice([1, rng.randrange(1, len(tokens[name]) - start + 1)])
            scheduled.append(step(name, start, count, samples=int(start + count == len(tokens[name]))))
        built = batch.build(tuple(scheduled))
        expected = naive_build(rows, tokens, tables, tuple(scheduled), block_size)
        for name in StepInputs.__slots__:
            assert getattr(built, name).tolist() == getattr(expected, name).tolist(), name
        grown = [s.request_id for s in scheduled if s.num_samples and len(tokens[s.request_id]) < window]
        if grown:
            batch.append(np.array([rows.index(name) for name in grown]), np.array([7000 + i] * len(grown)))
            for name in grown:
                tokens[name].append(7000 + i)
                if len(tokens[name]) > len(tables[name]) * block_size:
                    block = rng.randrange(1000)
                    new = Allocation(len(tables[name]), (block,))
                    batch.apply_allocations((step(name, len(tokens[name]) - 1, 1, allocation=new),))
                    tables[name].append(block)
