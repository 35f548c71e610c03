"""KV events of an engine: what a router believes is what the tiers hold, over evictions, deletions and restarts."""

import pytest

from kvstore.blocks.ids import Lineage
from kvstore.blocks.records import Evict
from kvstore.errors import ConfigError
from tests.support.by_hand import by_hand
from tests.support.engines import LLAMA_BLOCK_BYTES, ask, chain_of, evict_cpu, greedy, open_engine, settle, tokens
from tests.support.kv_reader import Reader, free_endpoint

TOPIC = "kv@pod@model"
OF_ADA = "kv@pod@ada:model"


@pytest.fixture
def endpoint():
    return free_endpoint()


@pytest.fixture
def reader(endpoint):
    with Reader(endpoint) as reader:
        yield reader


def prefixes(token_ids, block_size: int = 16) -> set[tuple[int, ...]]:
    return {tuple(token_ids[:end]) for end in range(block_size, len(token_ids) + 1, block_size)}


def serve(model, path, endpoint, **options):
    return open_engine(model, path, kv_events=endpoint, kv_events_topic=TOPIC, **options)


def agrees(engine, reader) -> None:
    """The router's picture becomes that of the tiers: as many blocks in each."""
    settle(engine)
    parts = engine.connector.parts

    def same() -> bool:
        held = {medium: sum(len(one.held(medium)) for one in reader.pictures.values()) for medium in
                ("GPU", "CPU", "STORAGE")}  # fmt: skip
        with parts.lock:
            stored = len(parts.store.disk.contents.index)
            return held == {"GPU": engine.loop.pool.num_cached, "CPU": parts.cpu.pool.num_cached, "STORAGE": stored}

    reader.read_until(same, "tiers and their picture agree")
    assert not any(one.unplaced for one in reader.pictures.values())


def test_states_are_not_announced(saved_model, tmp_path, endpoint, reader):
    model, said = saved_model("Qwen3_5Text"), tokens(1, 70)

    def is_told() -> bool:
        return TOPIC in reader.pictures and reader.pictures[TOPIC].held("STORAGE") == prefixes(said[:-1])

    with serve(model, tmp_path, endpoint) as engine:
        said += ask(engine, said, 12).token_ids
        settle(engine)
        reader.read_until(is_told, "what is told is the KV")
        assert engine.stats()["disk"]["blocks"] > len(prefixes(said[:-1])), "there are states, too"
    reader.pictures.clear()
    with serve(model, tmp_path, endpoint):
        reader.read_until(is_told, "so it is after a restart")


def test_a_router_knows_what_all_tiers_hold_and_again_after_a_restart(model, tmp_path, endpoint, reader):
    first, second = tokens(1, 70), tokens(2, 40)
    with serve(model, tmp_path, endpoint) as engine:
        said = [*first, *ask(engine, first, 12).token_ids]
        ask(engine, second, tenant="ada")
        agrees(engine, reader)
        picture = reader.pictures[TOPIC]
        assert all(prefixes(said[:-1]) == picture.held(medium) for medium in ("GPU", "CPU", "STORAGE"))
        assert prefixes(second) == reader.pictures[OF_ADA].held("GPU")
        evict_cpu(engine)
        agrees(engine, reader)
        assert picture.held("CPU") == set() and picture.held("STORAGE") == prefixes(said[:-1])
        events = engine.stats()["kv_events"]
        assert events["stored"] > 0 and events["removed"] > 0
    with serve(model, tmp_path, endpoint) as engine:
        reader.read_until(lambda: not picture.held("GPU") and picture.held("STORAGE"))
        agrees(engine, reader)
        assert picture.held("STORAGE") == prefixes(said[:-1])
        assert reader.pictures[OF_ADA].held("STORAGE") == prefixes(second)


def test_what_each_tier_evicts_is_told(model, tmp_path, endpoint, reader):
    """Tiers of 24, 12 and some 60 blocks, and talks of 200."""
    sizes = {"hbm": 24 * LLAMA_BLOCK_BYTES, "cpu": 12 * LLAMA_BLOCK_BYTES, "disk": "1MiB"}
    with serve(model, tmp_path, endpoint, **sizes, max_model_len=128) as engine:
        for seed in range(40):
            ask(engine, tokens(seed, 80), tenant="ada" if seed % 2 else "")
        agrees(engine, reader)
        store, cpu = engine.stats()["store"], engine.stats()["cpu"]
        assert cpu["evicted_blocks"] and store["disk_evictions"] and engine.loop.pool.num_evictions
        engine.admin.evict(Evict(everything=True))
        reader.read_until(lambda: not any(one.held("STORAGE") for one in reader.pictures.values()))
        agrees(engine, reader)


def test_splices_and_salted_chains_are_never_told(model, tmp_path, endpoint, reader):
    with by_hand(serve(model, tmp_path, endpoint)) as engine:
        salted, long = tokens(3, 50), tokens(5, 160)
        ask(engine, salted, cache_salt="secret")
        ask(engine, long)
        settle(engine)
        lineage, chain = Lineage(engine.facts.root("", "")), chain_of(engine, long)
        spans = [(0, 24), (60, 160)]
        spliced = engine.connector.splice(chain, long, lineage, spans, "")
        kept = [long[i] for span in spans for i in range(*span)]
        handle = engine.submit([*kept, *tokens(6, 40)], greedy(3), spliced=spliced)
        while engine.has_work:
            engine.step()
        assert handle.output.usage.cached_tokens_details.reencoded > 0
        agreed = tokens(7, 20)
        ask(engine, agreed)  # what comes last is told last
        settle(engine)
        picture = reader.pictures[TOPIC]
        told = prefixes([*long]) | prefixes(agreed)
        reader.read_until(lambda: picture.held("STORAGE") >= told)
        assert set(picture.tokens.values()) == told
        assert list(reader.pictures) == [TOPIC] and len(picture.held("STORAGE")) < engine.stats()["disk"]["blocks"]


def test_a_bad_endpoint_or_a_taken_port_is_refused(model, tmp_path, endpoint):
    for bad in ("5557", "udp://*:5557", "tcp://*:70000", "tcp://*"):
        with pytest.raises(ConfigError, match=r"kv_events is .*; give tcp://"):
            open_engine(model, kv_events=bad)
    with serve(model, None, endpoint), pytest.raises(ConfigError, match="cannot be listened at"):
        serve(model, None, endpoint)


def test_an_engine_without_a_store_tells_of_hbm(model, endpoint, reader):
    with serve(model, None, endpoint) as engine:
        ask(engine, tokens(1, 40))
        reader.read_until(lambda: reader.pictures[TOPIC].held("GPU") == prefixes(tokens(1, 40)))
