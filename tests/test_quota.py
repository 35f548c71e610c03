"""Limits per tenant: its own blocks go and nobody else's, in the order of eviction; usage is counted right."""

import hashlib
import random
import time

import pytest
from engines import ask, cached, check_closed, evict_cpu, open_engine, save_model, settle, tokens

from kvstore.connector import NullConnector, TenantUsage
from kvstore.conversation import Conversation
from kvstore.disk_index import DiskIndex, IndexEntry
from kvstore.errors import ConfigError
from kvstore.policy import EvictionOrder
from kvstore.quota import MOST_FOR_ONE, TRIM_BLOCKS, Quotas
from kvstore.return_model import ReturnModel

SIZE = 100


def block(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class Part:
    """Quotas over an index of blocks of SIZE bytes; what is evicted is noted."""

    def __init__(self, **num_blocks: int) -> None:
        self.index: DiskIndex | None = DiskIndex(lambda: 0.0)
        self.pinned: set[bytes] = set()
        self.gone: list[str] = []
        self.quotas = Quotas(self._evict, lambda: self.index)
        for tenant, count in num_blocks.items():
            self.write(tenant, count)

    def write(self, tenant: str, count: int) -> None:
        first = self.index.stored()[tenant].num_blocks if tenant in self.index.stored() else 0
        for i in range(first, first + count):
            self.index.add(
                IndexEntry(block(f"{tenant}{i}"), block(f"{tenant}{i - 1}"), SIZE, 0.0, 0.0, "m", tenant)
            )

    def _evict(self, index, num_bytes, tenant):
        victims = index.take_victims(num_bytes, self.pinned.__contains__, tenant)
        self.gone += [entry.tenant for entry in victims]
        return victims

    def num(self, tenant: str) -> int:
        return self.index.bytes_of(tenant) // SIZE


def test_without_a_limit_everything_is_admitted():
    part = Part(a=5)
    part.quotas.set_limit("b", 0)
    assert part.quotas.admits("a", 10**9) and part.gone == []


def test_a_write_over_the_limit_evicts_of_its_own_tenant():
    part = Part(b=5, a=5)
    part.quotas.set_limit("a", 5 * SIZE)
    assert part.quotas.admits("a", SIZE)
    assert part.gone == ["a"] and (part.num("a"), part.num("b")) == (4, 5)
    part.quotas.submitted("a", SIZE)
    assert part.quotas.admits("a", SIZE) and part.num("a") == 3, "what is on its way counts"
    part.quotas.ended("a", SIZE)
    assert part.quotas.admits("a", SIZE) and part.num("a") == 3
    assert part.quotas.as_dict() == {"limit_evictions": 2, "limit_dropped_writes": 0}


def test_a_write_is_dropped_and_counted_when_nothing_of_its_tenant_may_go():
    part = Part(a=2, b=5)
    part.pinned = {block("a1")}
    part.quotas.set_limit("a", 2 * SIZE)
    assert not part.quotas.admits("a", SIZE) and part.gone == []
    assert part.quotas.as_dict() == {"limit_evictions": 0, "limit_dropped_writes": 1}
    part.quotas.set_limit("b", 0)
    part.pinned = {block("b4")}
    assert not part.quotas.admits("b", SIZE)


def test_what_is_queued_may_exceed_a_limit_but_nothing_is_dropped_for_it():
    part = Part(a=0)
    part.quotas.set_limit("a", 2 * SIZE)
    for _ in range(3):
        assert part.quotas.admits("a", SIZE)
        part.quotas.submitted("a", SIZE)
    part.write("a", 3)
    for _ in range(3):
        part.quotas.ended("a", SIZE)
    part.quotas.suspect(part.index, ["a"])
    part.quotas.trim(part.index)
    assert part.num("a") == 2


def test_the_default_holds_for_all_without_a_limit_of_their_own():
    part = Part(a=9, b=9, c=9)
    part.quotas.set_limit(None, 3 * SIZE)
    part.quotas.set_limit("b", 100 * SIZE)
    part.quotas.set_limit("c", 0)
    part.quotas.trim(part.index)
    assert (part.num("a"), part.num("b"), part.num("c")) == (3, 9, 0)
    part.quotas.set_limit("b", None)
    part.quotas.trim(part.index)
    assert part.num("b") == 3, "the default again"
    part.quotas.set_limit(None, None)
    assert part.quotas.admits("a", SIZE) and part.num("a") == 3


def test_a_lowered_limit_is_reached_in_rounds_and_writes_go_on_meanwhile():
    part = Part(a=5 * TRIM_BLOCKS, b=7)
    part.quotas.set_limit("a", 10 * SIZE)
    part.quotas.trim(part.index)
    assert 0 < len(part.gone) <= TRIM_BLOCKS
    before = part.num("a")
    assert part.quotas.admits("a", SIZE) and before - part.num("a") == MOST_FOR_ONE
    for _ in range(5):
        before = part.num("a")
        part.quotas.trim(part.index)
        assert before - part.num("a") <= TRIM_BLOCKS
    assert (part.num("a"), part.num("b")) == (10, 7)


def test_who_has_nothing_that_may_go_does_not_hold_up_the_others():
    part = Part(a=1, b=TRIM_BLOCKS)
    part.pinned = {block("a0")}
    part.quotas.set_limit(None, 0)
    for _ in range(3):
        part.quotas.trim(part.index)
    assert (part.num("a"), part.num("b")) == (1, 0)
    part.pinned.clear()
    part.quotas.trim(part.index)
    assert part.num("a") == 0


def test_until_the_index_is_loaded_everything_is_admitted():
    part = Part(a=5)
    index, part.index = part.index, None
    part.quotas.set_limit("a", 0)
    assert part.quotas.admits("a", SIZE) and part.quotas.usage({"a": 2}) == {"a": TenantUsage(0, 0, 2, 0)}
    part.index = index
    part.quotas.suspect(index, index.stored())
    part.quotas.trim(index)
    assert part.num("a") == 0


def test_a_limit_below_zero_is_refused():
    with pytest.raises(ConfigError, match="-1 bytes; give 0 or more"):
        Part().quotas.set_limit(None, -1)


def test_without_a_store_nobody_has_anything():
    connector = NullConnector()
    connector.set_tenant_limit("a", 5)
    assert connector.tenant_usage() == {}


# -- the order within a tenant, against an index that has nothing else -------------------------------------------------
class World:
    """The same changes to an index of two tenants and to one of tenant "a" alone."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng, self.now_s, model = random.Random(seed), 1e6, ReturnModel()
        self.orders = [EvictionOrder(policy, model, lambda: self.now_s) for _ in range(2)]
        self.both, self.alone = (DiskIndex(lambda: self.now_s, order) for order in self.orders)
        self.talks: list[tuple[str, list[bytes], Conversation | None]] = []
        self.num_uses = 0

    def talk(self) -> None:
        """A new conversation, or a turn of an old one, or a branch of it."""
        rng = self.rng
        if self.talks and rng.random() < 0.6:
            number = rng.randrange(len(self.talks))
            tenant, chain, who = self.talks[number]
            if rng.random() < 0.3:
                chain = chain[: rng.randrange(len(chain)) + 1]
                if rng.random() < 0.5:
                    who = self._somebody()
                    self.talks.append((tenant, chain, who))
        else:
            tenant, chain = rng.choice("ab"), [rng.randbytes(32)]
            who = self._somebody() if rng.random() < 0.6 else None
            self.talks.append((tenant, chain, who))
        self._use(who)
        for _ in range(rng.randrange(1, 6)):
            entry = IndexEntry(rng.randbytes(32), chain[-1], rng.randrange(50, 150), 0.0, self.now_s, "m", tenant)
            self._each(tenant, lambda index, entry=entry: index.add(entry, who))
            chain.append(entry.block_id)
        self._each(tenant, lambda index: index.touch(chain, self.now_s, who))

    def _somebody(self) -> Conversation:
        return Conversation(len(self.talks) + 1, 0, self.now_s, self.now_s)

    def _use(self, who: Conversation | None) -> None:
        if who is None:
            return
        self.num_uses += 1
        who.use, who.used_s, who.category = self.num_uses, self.now_s, self.rng.randrange(3)
        if self.rng.random() < 0.2:
            who.pinned_until_s = self.now_s + self.rng.randrange(100)
        if self.rng.random() < 0.2:
            who.expires_s = self.now_s + self.rng.randrange(100)
        for order in self.orders:
            order.refresh(who)

    def look_again(self) -> None:
        """Nothing is written: an old conversation is of use, or has another value from now on."""
        if self.talks:
            tenant, chain, who = self.rng.choice(self.talks)
            self._use(who)
            if who is None or self.rng.random() < 0.5:
                self._each(tenant, lambda index: index.touch(chain, self.now_s, who))

    def _each(self, tenant: str, change) -> None:
        for index in (self.both, self.alone) if tenant == "a" else (self.both,):
            change(index)

    def evict_of_one(self, share: float) -> None:
        num_bytes, num_others = int(share * self.alone.num_bytes), self.both.bytes_of("b")
        gone = self.both.take_victims(num_bytes, tenant="a")
        assert gone == self.alone.take_victims(num_bytes) and self.both.bytes_of("b") == num_others

    def evict_of_all(self, num_bytes: int) -> None:
        for entry in self.both.take_victims(num_bytes):
            self.alone.remove(entry.block_id)

    def forget(self) -> None:
        tenant, chain, _ = self.rng.choice(self.talks)
        for block_id in reversed(self.both.descendants(self.rng.choice(chain))):
            self._each(tenant, lambda index, block_id=block_id: index.remove(block_id))


@pytest.mark.parametrize("policy", ["lru", "fifo", "return"])
@pytest.mark.parametrize("seed", range(8))
def test_of_a_tenant_goes_what_would_go_if_it_were_alone(seed, policy):
    world, num_victims = World(seed, policy), 0
    for step in range(300):
        world.now_s += world.rng.random() * 20
        action = world.rng.random()
        if action < 0.4:
            world.talk()
        elif action < 0.7:
            world.look_again()
        elif action < 0.85:
            before = world.both.num_blocks
            world.evict_of_one(world.rng.choice([0.01, 0.1, 0.5]))
            num_victims += before - world.both.num_blocks
        elif action < 0.95:
            world.evict_of_all(world.rng.randrange(1000))
        elif world.talks:
            world.forget()
        if step % 25 == 0:
            world.both.check_integrity()
    world.both.check_integrity()
    assert world.both.bytes_of("a") == world.alone.num_bytes and num_victims > 50


# -- engines -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def usage(engine, tenant: str) -> TenantUsage:
    return engine.connector.tenant_usage().get(tenant, TenantUsage())


def talk(engine, tenant: str, seeds, length: int = 161) -> None:
    for seed in seeds:
        ask(engine, tokens(seed, length), 1, tenant=tenant)
    settle(engine)


def hit_on_disk(engine, tenant: str, seed: int) -> int:
    evict_cpu(engine)
    engine.pool.evict_all()
    return cached(ask(engine, tokens(seed, 161), 1, tenant=tenant))[2]


def closed(engine, *tenants: str) -> bool:
    roots = {engine.connector.lineage_root(tenant, "") for tenant in tenants}
    assert check_closed(engine, roots)
    with engine.connector._lock:
        engine.connector._store.disk._index.check_integrity()
    return True


def wait_for_index(engine) -> None:
    wait_until(lambda: engine.stats()["disk"]["index_loaded"])


def test_a_tenant_stays_within_its_limit_and_another_keeps_what_it_has(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        wait_for_index(engine)
        talk(engine, "anna", [1])
        a_block = usage(engine, "anna").disk_bytes // usage(engine, "anna").disk_blocks
        limit = 35 * a_block
        engine.connector.set_tenant_limit("anna", limit)
        talk(engine, "bert", range(10, 16))
        before = usage(engine, "bert")
        assert (before.disk_blocks, before.limit_bytes) == (60, None) and before.cpu_blocks == 60
        talk(engine, "anna", range(2, 10))
        wait_until(lambda: usage(engine, "anna").disk_bytes <= limit)
        settle(engine)
        anna = usage(engine, "anna")
        assert 25 < anna.disk_blocks <= 35 and anna.limit_bytes == limit
        assert usage(engine, "bert").disk_blocks == 60 and usage(engine, "bert").disk_bytes == before.disk_bytes
        assert engine.stats()["disk"]["limit_evictions"] >= 55 and counted(engine) == 0
        assert closed(engine, "anna", "bert")
        assert [hit_on_disk(engine, "bert", seed) for seed in range(10, 16)] == [160] * 6
        kept = {entry.tenant for batch in engine.connector._disk_tier.scan() for entry in batch}
        assert kept == {"anna", "bert"}, "what is on disk says whose it is"


def counted(engine) -> int:
    """Evictions to make room on the disk."""
    return engine.stats()["store"]["disk_evictions"]


def test_a_conversation_longer_than_its_tenants_limit_keeps_its_head(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        wait_for_index(engine)
        talk(engine, "bert", [3])
        a_block = usage(engine, "bert").disk_bytes // 10
        engine.connector.set_tenant_limit("anna", 6 * a_block)
        prompt = tokens(1, 161)
        for length in (33, 65, 161):
            talk(engine, "anna", [1], length)
        wait_until(lambda: usage(engine, "anna").disk_bytes <= 6 * a_block)
        settle(engine)
        assert 4 <= usage(engine, "anna").disk_blocks <= 6 and closed(engine, "anna", "bert")
        talk(engine, "anna", [1])
        evict_cpu(engine)
        engine.pool.evict_all()
        again = cached(ask(engine, prompt, 1, tenant="anna"))
        assert 0 < again[2] <= 6 * 16 and hit_on_disk(engine, "bert", 3) == 160


def test_a_limit_of_nothing_drops_writes_and_counts_them(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        wait_for_index(engine)
        engine.connector.set_tenant_limit(None, 0)
        talk(engine, "anna", [1, 2])
        assert usage(engine, "anna") == TenantUsage() and engine.stats()["disk"]["limit_dropped_writes"] == 2
        engine.connector.set_tenant_limit(None, None)
        talk(engine, "anna", [1, 2, 3])
        assert usage(engine, "anna").disk_blocks >= 10
        assert closed(engine, "anna")


def test_a_lower_limit_holds_for_what_is_there_at_run_time_and_after_a_restart(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        wait_for_index(engine)
        talk(engine, "anna", range(1, 5))
        talk(engine, "bert", range(5, 9))
        half = usage(engine, "anna").disk_bytes // 2
        engine.connector.set_tenant_limit("anna", half)
        wait_until(lambda: usage(engine, "anna").disk_bytes <= half)
        settle(engine)
        assert 18 <= usage(engine, "anna").disk_blocks <= 20 and usage(engine, "bert").disk_blocks == 40
        assert closed(engine, "anna", "bert")
    with open_engine(model, tmp_path / "store") as engine:
        wait_for_index(engine)
        before = usage(engine, "bert").disk_bytes
        assert usage(engine, "anna").disk_blocks <= 20 and usage(engine, "bert").disk_blocks == 40
        engine.connector.set_tenant_limit(None, half // 2)
        engine.connector.set_tenant_limit("bert", before)
        wait_until(lambda: usage(engine, "anna").disk_bytes <= half // 2)
        settle(engine)
        assert usage(engine, "bert") == TenantUsage(40, before, usage(engine, "bert").cpu_blocks, before)
        assert closed(engine, "anna", "bert")
        assert [hit_on_disk(engine, "bert", seed) for seed in range(5, 9)] == [160] * 4
