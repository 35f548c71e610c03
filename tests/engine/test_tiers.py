"""The invariants of the tiers, on small random models with stores in temporary directories.

Greedy and float32 where tokens are compared; an engine without tiers is what they are compared with.
"""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvstore.disk.tier
import kvstore.memory.transfer
from kvstore import Engine
from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict
from kvstore.errors import ConfigError
from tests.support.by_hand import by_hand
from tests.support.engines import (
    LLAMA_BLOCK_BYTES,
    Plain,
    ask,
    cached,
    chain_of,
    check_closed,
    counters,
    evict_cpu,
    evict_hbm,
    evict_memory,
    greedy,
    open_engine,
    save_model,
    settle,
    tokens,
)
from tests.support.faults import before_each_save, disk_that
from tests.support.models import make_model
from tests.support.waiting import TIMEOUT_S, wait_until

# Rotation in halves, interleaved, partial; per layer type; not in every layer; sliding windows; sinks; shapes.
NAMES = ["Llama", "Qwen3", "Mistral", "Gemma3", "SmolLM3", "Glm4", "GPTNeoX", "GptOss", "Cohere2", "Gemma3nText",
         "Gemma4Text", "Gemma4Text small", "Gemma4Text MoE", "MiMoV2Flash"]  # fmt: skip


def hbm_blocks(engine: Engine, chain: list[BlockId]) -> list[torch.Tensor]:
    """Rotated keys and values of every layer of these blocks, as they lie in HBM."""
    numbers = [engine.loop.pool.lookup(block_id) for block_id in chain]
    assert None not in numbers
    windows, runner = engine.loop.scheduler.manager.windows, engine.loop.runner
    slots = numbers if windows is None else windows.of[numbers].tolist()
    rows = [numbers if number is not None else slots for number in runner.model.spec.numbers]
    return [cache[own].clone() for layer, own in zip(runner.caches, rows, strict=True) for cache in layer]


# -- invariant 1 -------------------------------------------------------------------------------------------------------
def conversation(engine: Engine, plain: Plain, before_turn=lambda engine: engine, num_turns: int = 4) -> list[int]:
    """Turns of growing history; returns how many tokens of each were cached. `before_turn` may bring another engine."""
    history, hits = tokens(1, 40), []
    for turn in range(num_turns):
        engine = before_turn(engine)
        out = ask(engine, history, 12)
        assert out.token_ids == plain(history, 12), f"turn {turn}"
        hits.append(sum(cached(out)))
        history = history + out.token_ids + tokens(100 + turn, 9)
        engine.check_integrity()
    return hits


WARM = [0, 48, 64, 80]  # of the history all but its last token, in whole blocks; it grows by 21 each turn


def as_it_is(engine):
    return engine


def without_hbm(engine):
    engine.loop.pool.evict_all()
    return engine


def without_cpu(engine):
    evict_cpu(engine)
    return without_hbm(engine)


def without_all(engine):
    settle(engine)
    engine.admin.evict(Evict(everything=True))
    settle(engine)
    assert check_closed(engine, set()) == 0
    return engine


@pytest.mark.parametrize(
    ("evict", "hits", "num_loaded", "num_read"),
    [(as_it_is, WARM, 0, 0), (without_hbm, WARM, 12, 0), (without_cpu, WARM, 12, 12), (without_all, [0] * 4, 0, 0)],
)
def test_invariant_1_same_tokens_with_tiers_evicted(model, plain, store, evict, hits, num_loaded, num_read):
    with open_engine(model, store) as engine:
        assert conversation(engine, plain, evict) == hits
        assert (counters(engine)["loaded"], counters(engine)["read"]) == (num_loaded, num_read)


# -- invariant 2 -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "codec"),
    [
        ("float32", "raw"), ("float16", "zstd"), ("bfloat16", "split-zstd"), ("float32", "split-zstd"),
        ("bfloat16", "exact12"), ("float16", "exact12"),
    ],
)  # fmt: skip
def test_invariant_2_blocks_are_bit_identical_after_a_trip_through_every_tier(model, store, dtype, codec, caplog):
    prompt = tokens(41, 100)
    with open_engine(model, store, codec=codec, dtype=dtype) as engine:
        out = ask(engine, prompt, 20)
        chain = chain_of(engine, (prompt + out.token_ids)[:-1])
        computed = hbm_blocks(engine, chain)
        assert ("stored raw" in caplog.text) == ((dtype, codec) == ("float16", "exact12"))
        evict_hbm(engine)
        assert cached(ask(engine, [*prompt, *out.token_ids, 1])) == (0, 112, 0, 0)
        assert all(map(torch.equal, hbm_blocks(engine, chain), computed)), "HBM -> CPU -> HBM"
        evict_memory(engine)
        assert cached(ask(engine, [*prompt, *out.token_ids, 2])) == (0, 0, 112, 0)
        assert all(map(torch.equal, hbm_blocks(engine, chain), computed)), "HBM -> CPU -> disk -> CPU -> HBM"
    with open_engine(model, store, dtype=dtype) as engine:
        assert cached(ask(engine, [*prompt, *out.token_ids, 3])) == (0, 0, 112, 0)
        assert all(map(torch.equal, hbm_blocks(engine, chain), computed)), "after a restart"


def test_blocks_are_rewritten_in_another_codec_under_an_engine(model, store):
    """What the engine knows of the disk has the new sizes."""
    prompt = tokens(44, 100)
    with open_engine(model, store, dtype="bfloat16", block_size=32) as engine:  # some pages a block
        ask(engine, prompt)
        engine.flush()
        chain, index = chain_of(engine, prompt), engine.connector.parts.store.disk.contents.index
        computed, before = hbm_blocks(engine, chain), index.bytes.total
        with pytest.raises(ConfigError, match=r"codec is 'foo'; give .*exact12"):
            engine.admin.compact("foo")
        engine.admin.compact("exact12")
        engine.check_integrity()
        on_disk = [entry for entries in engine.connector.parts.disk.scan() for entry in entries]
        assert index.bytes.total == sum(entry.stored_bytes for entry in on_disk) < before
        evict_memory(engine)
        assert cached(ask(engine, [*prompt, 1])) == (0, 0, 96, 0)
        assert all(map(torch.equal, hbm_blocks(engine, chain), computed))


@pytest.mark.parametrize("name", NAMES)
def test_invariant_2_for_every_rotation_and_a_splice_rotates_at_the_new_position(saved_model, store, name):
    """At its old position a block comes back bit for bit; spliced, it is its raw keys rotated where they are now. Of
    layers with a window, that holds for the last blocks, and a splice turns their keys.
    """
    prompt = tokens(42, 150)
    with by_hand(open_engine(saved_model(name), store, dtype="bfloat16")) as engine:
        ask(engine, prompt)
        settle(engine)
        chain = chain_of(engine, prompt)
        computed = hbm_blocks(engine, chain)
        engine.loop.pool.evict_all()
        assert cached(ask(engine, [*prompt, 1])) == (0, 144, 0, 0)
        model, arena, cpu = engine.loop.runner.model, engine.connector.parts.arena, engine.connector.parts.cpu
        whole = [0 if number is not None else -arena.layout.window_blocks for number in model.spec.numbers]
        for part, (found, expected) in enumerate(zip(hbm_blocks(engine, chain), computed, strict=True)):
            assert torch.equal(found[whole[part // 2] :], expected[whole[part // 2] :])
        arena_blocks = [cpu.arena_block_of(one) for one in chain]
        raw = [[part[arena_blocks].flatten(0, 1) for part in layer] for layer in arena.layers]  # [tokens, heads, dim]
        spans = [(0, 21), (60, 144)]
        kept = [i for start, end in spans for i in range(start, end)]
        root = Lineage(engine.facts.root(""))
        spliced, lineage = engine.connector.splice(chain, prompt[:144], root, spans, "")
        assert (lineage.splice_index, lineage.splice_end) == (1, len(kept) // 16) == (1, len(spliced))
        handle = engine.submit([prompt[i] for i in kept] + [1, 2, 3], greedy(3), spliced=(spliced, lineage))
        while engine.has_work:
            engine.step()
        first = (0, 16) if any(whole) else (16, 0)  # nobody begins behind a block whose windows were not loaded
        assert cached(handle.output) == (*first, 0, 16 * (len(spliced) - 1))
        found = hbm_blocks(engine, spliced)
        places = torch.arange(16 * len(spliced))
        for layer, (rotation, number) in enumerate(zip(model.rotations, model.spec.numbers, strict=True)):
            old = (
                [part.flatten(0, 1) for part in computed[2 * layer : 2 * layer + 2]] if number is None else raw[number]
            )
            key, value = (part[kept[: len(places)]] for part in old)
            if rotation is not None and number is None:
                key = rotation.turn(key, torch.tensor(kept[: len(places)]), places)
            elif rotation is not None:
                key = rotation.at(places).apply(key)
            end = 16 * whole[layer]
            assert torch.equal(found[2 * layer].flatten(0, 1)[end:], key[end:])
            assert torch.equal(found[2 * layer + 1].flatten(0, 1)[end:], value[end:])
        engine.check_integrity()


# -- invariant 4 -------------------------------------------------------------------------------------------------------
def test_invariant_4_another_identity_never_hits_and_all_live_together(tmp_path, store):
    """Model, dtype, block size, RoPE setting, tenant, salt: each finds its own KV again, and nobody else's."""
    rope = {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}
    base, other = save_model(tmp_path / "a"), save_model(tmp_path / "b", seed=1)
    third = save_model(tmp_path / "c", **rope)
    variants = [(base, {}), (other, {}), (third, {}), (base, {"dtype": "bfloat16"}), (base, {"block_size": 8})]
    owners = [{}, {"tenant": "t"}, {"cache_salt": "t"}, {"tenant": "t", "cache_salt": "t"}]
    prompt, answers = tokens(51, 50), []
    for model, options in variants:
        with open_engine(model, store, **options) as engine:
            outs = [ask(engine, prompt, 8, **owner) for owner in owners]
            assert [out.usage.cached_tokens for out in outs] == [0, 0, 0, 0], (model, options)
            assert all(out.token_ids == outs[0].token_ids for out in outs)
            answers.append(outs[0].token_ids)
    for (model, options), answer in zip(variants, answers, strict=True):
        with open_engine(model, store, **options) as engine:
            for owner in owners:
                out = ask(engine, prompt, 8, **owner)
                assert cached(out) == (0, 0, 48, 0) and out.token_ids == answer


def test_invariant_4_weights_changed_in_place_never_hit(tmp_path, store):
    folder = tmp_path / "model"
    path, prompt = save_model(folder), tokens(52, 50)
    with open_engine(path, store) as engine:
        before = ask(engine, prompt, 8).token_ids
    make_model(seed=9).save_pretrained(folder)
    with open_engine(path, store) as engine:
        out = ask(engine, prompt, 8)
        assert out.usage.cached_tokens == 0 and out.token_ids != before
    make_model(seed=0).save_pretrained(folder)
    with open_engine(path, store) as engine:
        out = ask(engine, prompt, 8)
        assert cached(out)[2] == 48 and out.token_ids == before


# -- invariants 7 and 8 ------------------------------------------------------------------------------------------------
def check_made_up_for(engine: Engine, plain: Plain, history: list[int], num_before: int) -> None:
    """After a drop: a turn stops before the hole, computes and saves it; the turn after it hits everything."""
    num_blocks = (len(history) - 1) // 16
    out = ask(engine, [*history, 1], 4)
    assert out.token_ids == plain([*history, 1], 4) and sum(cached(out)) == num_before
    evict_hbm(engine)
    out = ask(engine, [*history, 2], 4)
    assert out.token_ids == plain([*history, 2], 4) and sum(cached(out)) == 16 * num_blocks
    settle(engine)


def test_invariant_8_a_full_save_queue_drops_and_leaves_no_lasting_hole(model, plain, store, monkeypatch):
    history = tokens(61, 40)
    with open_engine(model, store) as engine:
        ask(engine, history, 4)
        settle(engine)
        with monkeypatch.context() as patch:
            patch.setattr(kvstore.memory.transfer.Transfer, "can_save", False)
            history = history + tokens(62, 60)
            out = ask(engine, history, 30)
            assert out.token_ids == plain(history, 30)
            assert counters(engine)["dropped_saves"] == 1 and counters(engine)["saved"] == 2
            history = history + out.token_ids
        settle(engine)
        check_made_up_for(engine, plain, history, 32)
        assert engine.stats()["store"]["unsaved"] == 0


def test_choices_that_share_a_block_are_not_dropped_for_want_of_room(model, plain, store):
    prompt = tokens(65, 40)
    with open_engine(model, store) as engine:
        (out,) = engine.generate([prompt], greedy(30, n=4, temperature=1.0, seed=3))
        settle(engine)
        assert len({tuple(choice.token_ids) for choice in out.choices}) == 4
        assert counters(engine)["dropped_saves"] == 0 and counters(engine)["saved"] == 2 + 2
        for choice in out.choices[1:]:  # begun within a block of the first one's: saved by the turn that follows
            check_made_up_for(engine, plain, [*prompt, *choice.token_ids], 32)


def test_invariant_8_a_full_cpu_tier_drops_and_leaves_no_lasting_hole(model, plain, store):
    """A disk so slow that every arena block is dirty."""
    go, write = threading.Event(), kvstore.disk.tier.DiskTier.write

    def slow(*args):
        go.wait(2 * TIMEOUT_S)
        return write(*args)

    with open_engine(model, store, cpu=8 * LLAMA_BLOCK_BYTES) as engine:
        with disk_that(write=slow):
            first, history = tokens(63, 84), tokens(64, 70)
            ask(engine, first)
            out = ask(engine, history, 30)
            assert out.token_ids == plain(history, 30)
            wait_until(lambda: counters(engine)["saved"] == 8)
            assert counters(engine)["dropped_saves"] == 1
            go.set()
        settle(engine)
        check_made_up_for(engine, plain, history + out.token_ids, 48)


@pytest.mark.parametrize("ends", ["after its newer copy was queued", "while that is computed"])
def test_invariant_8_a_block_evicted_during_its_write_leaves_what_builds_on_its_newer_copy(model, plain, store, ends):
    """Without a CPU tier, where nothing but the disk knows what builds on a block."""
    begun, go, ended, write = threading.Event(), threading.Event(), threading.Event(), kvstore.disk.tier.DiskTier.write

    def slow(*args):
        begun.set()
        go.wait(2 * TIMEOUT_S)
        outcome = write(*args)
        ended.set()
        return outcome

    def end_write(layer):
        go.set()
        ended.wait(2 * TIMEOUT_S)

    prompt = tokens(66, 40)
    with open_engine(model, store, cpu=0) as engine:
        with disk_that(write=slow):
            ask(engine, prompt[:17])
            wait_until(begun.is_set)
            assert "cpu" not in engine.admin.evict(Evict(everything=True)), "there is no such tier"
            engine.loop.pool.evict_all()
            if ends == "while that is computed":
                with before_each_save(end_write):
                    ask(engine, prompt)
            else:
                ask(engine, prompt)
                wait_until(lambda: counters(engine)["saved"] == 3)
            go.set()
            settle(engine)
        assert check_closed(engine, {engine.facts.root("")}) == 2
        engine.loop.pool.evict_all()
        out = ask(engine, prompt)
        assert out.token_ids == plain(prompt, 4) and sum(cached(out)) == 32


def test_invariant_7_a_tiny_disk_evicts_tails_and_stays_its_size(model, plain, store):
    """Twenty conversations where the file has room for few: what stays is usable, and nothing is wrong."""
    disk = 2 << 20
    with open_engine(model, store, cpu=40 * LLAMA_BLOCK_BYTES, disk=disk) as engine:
        histories = [tokens(seed, 100) for seed in range(80, 100)]
        for turn in range(2):
            for number, history in enumerate(histories):
                out = ask(engine, history, 6)
                assert out.token_ids == plain(history, 6)
                histories[number] = [*history, *out.token_ids, turn]
                if number % 4 == 0:
                    engine.loop.pool.evict_all()
                    settle(engine)
                    check_closed(engine, {engine.facts.root("")})
        settle(engine)
        assert counters(engine)["disk_evictions"] > 0
        assert (store / "blocks" / "data.mdb").stat().st_size <= disk
        assert check_closed(engine, {engine.facts.root("")}) > 0
        out = ask(engine, [*histories[-1], 1], 4)
        assert sum(cached(out)) >= 96, "what was used last is there"
    with open_engine(model, store, cpu=40 * LLAMA_BLOCK_BYTES, disk=disk) as engine:
        assert check_closed(engine, {engine.facts.root("")}) > 0
        for history in histories:
            assert ask(engine, [*history, 1], 4).token_ids == plain([*history, 1], 4)


@pytest.mark.parametrize(("num_cpu_blocks", "disk"), [(0, 2 << 20), (12, 0), (12, 2 << 20)])
def test_what_is_said_is_right_and_what_is_stored_is_closed_under_parents(model, plain, store, num_cpu_blocks, disk):
    """Invariants 1, 7 and 8: random requests that share stems, in a pool of about two of them; aborts, preemptions,
    evictions of every kind, failing saves; checked whenever nothing is in flight.
    """
    rng, cpu = random.Random(f"{num_cpu_blocks} {disk}"), num_cpu_blocks * LLAMA_BLOCK_BYTES

    def unreliable(layer):
        if rng.random() < 0.05:
            raise MemoryError("injected")

    stems = [tokens(seed, 120) for seed in range(110, 116)]
    options = {"hbm": 20 * LLAMA_BLOCK_BYTES, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    with before_each_save(unreliable), by_hand(open_engine(model, store, cpu=cpu, disk=disk, **options)) as engine:
        for number in range(50):  # in some, all reads come so late that nobody is preempted
            handles = []
            for _ in range(rng.randrange(1, 7)):
                prompt = [*rng.choice(stems)[: rng.randrange(10, 120)], rng.randrange(3)]
                handles.append((prompt, engine.submit(prompt, greedy(20))))
                for _ in range(rng.randrange(4)):
                    engine.step()
                    engine.loop.scheduler.roster.check_integrity()
                if rng.random() < 0.1:
                    engine.abort(rng.choice(handles)[1])
                if rng.random() < 0.1:
                    engine.admin.evict(Evict(to_bytes=rng.randrange(10) * LLAMA_BLOCK_BYTES))
                if rng.random() < 0.2:
                    engine.loop.pool.evict_all()
            while engine.has_work:
                engine.step()
            for prompt, handle in handles:
                got = handle.output.token_ids
                assert got == plain(prompt, 20)[: len(got)]
            settle(engine)
            check_closed(engine, {engine.facts.root("")})
            assert num_cpu_blocks == 0 or engine.stats()["cpu"]["cached_blocks"] <= num_cpu_blocks
            if number >= 4 and engine.loop.scheduler.roster.num_preemptions > 0:
                break
        assert engine.loop.scheduler.roster.num_preemptions > 0


def test_a_flush_ends_while_requests_go_on_and_the_disk_is_slow(tmp_path, store):
    """A fence in time: what is written behind it is not waited for, else it would never end under load."""
    write, ends, times = kvstore.disk.tier.DiskTier.write, threading.Event(), []

    def slow(*arguments):
        times.append(time.monotonic())
        time.sleep(0.05)
        return write(*arguments)

    def keep_asking(engine: Engine, seed: int) -> None:
        for number in itertools.count(1000 * seed):
            ask(engine, tokens(number, 60), 40)
            if ends.is_set():
                return

    sizes = {"hbm": "16MiB", "cpu": "64MiB", "disk": "256MiB"}
    opened = open_engine(save_model(tmp_path), store, **sizes)
    with disk_that(write=slow), opened as engine, ThreadPoolExecutor() as threads:
        asking = [threads.submit(keep_asking, engine, seed) for seed in range(1, 5)]
        try:
            wait_until(lambda: len(times) > 8)
            chain = chain_of(engine, prompt := tokens(7, 64))
            ask(engine, prompt, 2)
            threads.submit(engine.flush).result(TIMEOUT_S)
            on_disk = engine.connector.parts.store.disk.contents
            assert all(map(on_disk.contains, chain))
            assert not any(one.done() for one in asking)
        finally:
            ends.set()


# -- what a request writes ---------------------------------------------------------------------------------------------
def test_what_a_request_writes_is_counted_once(model, store):
    prompt = tokens(70, 100)
    with open_engine(model, store) as engine:
        first, again = ask(engine, prompt, 40), ask(engine, prompt, 40)
        assert (first.usage.cache_write_tokens, again.usage.cache_write_tokens) == (96, 0)
        longer = [*prompt, *first.token_ids, *tokens(71, 50)]
        usage = engine.generate([longer], greedy(4, n=3))[0].usage
        assert (usage.cached_tokens, usage.cache_write_tokens) == (128, 48), "the answer's blocks were there"
        both = engine.generate([tokens(72, 64)] * 2, greedy(1))
        assert sorted(out.usage.cache_write_tokens for out in both) == [0, 64]
        settle(engine)
    with open_engine(model, store) as engine:
        assert ask(engine, longer).usage.cache_write_tokens == 0
    with open_engine(model) as engine:
        assert ask(engine, prompt).usage.cache_write_tokens == 0, "there is no tier below HBM"


def test_only_what_finds_room_counts_as_written(model, store):
    with open_engine(model, store, cpu=8 * LLAMA_BLOCK_BYTES) as engine:
        outs = engine.generate([tokens(seed, 160) for seed in range(80, 88)], greedy(1))
        settle(engine)
        written = sum(out.usage.cache_write_tokens for out in outs)
        assert 0 < written == 16 * counters(engine)["saved"] and counters(engine)["dropped_saves"]


def test_what_was_written_before_a_preemption_counts(model, store):
    with by_hand(open_engine(model, store, max_num_batched_tokens=48)) as engine:
        handle = engine.submit(tokens(90, 160), greedy(1))
        engine.step()
        roster = engine.loop.scheduler.roster
        roster.preempt(*roster.requests.values())
        while not handle.done:
            engine.step()
        assert (handle.output.usage.cached_tokens, handle.output.usage.cache_write_tokens) == (0, 160)
