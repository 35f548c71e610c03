"""What is written to the disk and what is refused: a tenant's limit, counted right, at nobody else's cost."""

from kvstore.blocks.records import Evict
from tests.support.engines import (
    ask,
    cached,
    check_closed,
    counters,
    evict_memory,
    open_engine,
    settle,
    tokens,
)

BLOCKS = 10  # of a prompt


def on_disk(engine, tenant: str) -> int:
    with engine.connector.parts.lock:
        return engine.connector.parts.store.disk.contents.index.bytes.of(tenant)


def talk(engine, tenant: str, seeds) -> None:
    for seed in seeds:
        ask(engine, tokens(seed, 16 * BLOCKS + 1), 1, tenant=tenant)
    settle(engine)


def hit_on_disk(engine, tenant: str, seed: int) -> int:
    evict_memory(engine)
    return cached(ask(engine, tokens(seed, 16 * BLOCKS + 1), 1, tenant=tenant))[2]


def is_closed(engine, *tenants: str) -> bool:
    with engine.connector.parts.lock:
        engine.connector.parts.store.disk.contents.index.check_integrity()
    return bool(check_closed(engine, {engine.facts.root(tenant, "") for tenant in tenants}))


def test_a_tenant_over_its_limit_has_its_writes_refused_and_nobody_else(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        talk(engine, "anna", [1])
        a_block = on_disk(engine, "anna") // BLOCKS
    limit = 25 * a_block
    with open_engine(model, tmp_path / "store", disk_per_tenant=limit) as engine:
        talk(engine, "anna", [2, 3, 4, 5])
        assert 24 * a_block <= on_disk(engine, "anna") <= limit
        refused = counters(engine)["refused_writes"]
        assert refused > 0 and counters(engine)["disk_evictions"] == counters(engine)["dropped_writes"] == 0
        talk(engine, "bert", [10, 11])
        assert on_disk(engine, "bert") == 20 * a_block and counters(engine)["refused_writes"] == refused
        assert is_closed(engine, "anna", "bert")
        assert [hit_on_disk(engine, "anna", seed) for seed in (1, 2)] == [160, 160], "what was there stays"
        assert 0 < hit_on_disk(engine, "anna", 3) < 160 and hit_on_disk(engine, "anna", 5) == 0
        assert [hit_on_disk(engine, "bert", seed) for seed in (10, 11)] == [160, 160]


def test_what_goes_makes_room_for_more_of_its_tenant(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        talk(engine, "anna", [1])
        limit = on_disk(engine, "anna")
    with open_engine(model, tmp_path / "store", disk_per_tenant=limit) as engine:
        talk(engine, "anna", [2])
        assert on_disk(engine, "anna") == limit and hit_on_disk(engine, "anna", 2) == 0
        engine.admin.evict(Evict(everything=True))
        talk(engine, "anna", [3])
        assert on_disk(engine, "anna") == limit and hit_on_disk(engine, "anna", 3) == 160
        assert is_closed(engine, "anna")


def test_a_limit_of_nothing_refuses_everything(model, tmp_path):
    with open_engine(model, tmp_path / "store", disk_per_tenant=0) as engine:
        talk(engine, "anna", [1, 2])
        assert on_disk(engine, "anna") == 0 and counters(engine)["refused_writes"] > 0
        assert is_closed(engine, "anna") is False, "nothing is stored"
