"""Tests of kvstore.hosts.sglang: what HiCache stores comes back, and nothing else does. SGLang's own interface where
its package is, a stand-in where it is not; host pools are stand-ins.
"""

import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvstore.errors import ConfigError, StoreError, StoreLockedError
from tests.support import hicache
from tests.support.hicache import PAGE_TOKENS, HostPool, LogicalPool, pages_of
from tests.support.programs import writer_held_up
from tests.support.waiting import TIMEOUT_S, together, wait_until

hicache.provide()
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from kvstore.hosts.sglang import KVStoreBackend  # noqa: E402

IS_STAND_IN = HiCacheStorage is hicache.HiCacheStorage
needs_sglang = [pytest.mark.sglang, pytest.mark.skipif(IS_STAND_IN, reason="needs SGLang's package")]


def config(path, tp_rank=0, tp_size=1, is_mla=False, model="a-model", **extra):
    options = {"path": str(path), "disk": "16MiB", "interface_v1": 1, "timeout_s": TIMEOUT_S, **extra}
    return HiCacheStorageConfig(
        tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=is_mla,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=model, extra_config=options,
    )  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """Starts back ends on one store; closes what a test has not."""
    opened = []

    def make(pool=None, identity="these weights", **options):
        if identity is not None:
            options["identity"] = identity
        opened.append(KVStoreBackend(config(tmp_path / "store", **options), {}))
        opened[-1].register_mem_pool_host(pool or HostPool())
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def after(prefix):
    return HiCacheStorageExtraInfo(prefix_keys=list(prefix))


def stored(backend, pages, prefix=()):
    indices = backend.mem_pool_host.compute(pages)
    assert backend.batch_set_v1(pages, indices, after(prefix)) == [True] * len(pages)


def loaded(backend, pages):
    """Of each page, whether it was read; what was read is compared."""
    pool = backend.mem_pool_host
    pool.kv_buffer.zero_()
    read = backend.batch_get_v1(pages, torch.arange(len(pages) * PAGE_TOKENS), after(()))
    for i, (page, ok) in enumerate(zip(pages, read, strict=True)):
        assert not ok or pool.has(page, i), "another page's bytes"
    return read


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_in_place_or_copied_also_after_a_restart(start, layout):
    backend, pages = start(HostPool(layout)), pages_of("a", 8)
    stored(backend, pages[:5])
    stored(backend, pages[5:], pages[:5])
    assert backend.batch_exists(pages, after(())) == 8 and loaded(backend, pages) == [True] * 8
    backend.close()
    again = start(HostPool(layout))
    assert again.exists(pages[7]) and loaded(again, pages) == [True] * 8


def test_calls_with_tensors_copy_whole_pages(start):
    pool, pages = HostPool(), pages_of("a", 3)
    backend = start(pool, interface_v1=0)
    starts = pool.compute(pages).tolist()[::PAGE_TOKENS]
    assert backend.batch_set(pages, [pool.get_data_page(start) for start in starts])
    assert backend.batch_exists(pages) == 3
    wanted = [*pages, "ab" * 32]
    read = backend.batch_get(wanted, [pool.get_dummy_flat_data_page() for _ in wanted])
    assert [one is not None for one in read] == [True, True, True, False]
    assert all(torch.equal(one, pool.get_data_page(at)) for one, at in zip(read, starts, strict=False))


def test_exists_counts_from_the_beginning_and_reads_say_of_each(start):
    backend, pages = start(), pages_of("a", 6)
    stored(backend, [*pages[:3], *pages[4:]])
    assert backend.batch_exists(pages) == 3 and not backend.exists(pages[3])
    assert loaded(backend, pages) == [True, True, True, False, True, True]
    assert backend.batch_exists(pages[3:]) == 0


@pytest.mark.parametrize(
    "other", [{"identity": "other weights"}, {"pool": HostPool(dtype=torch.float16)}, {"pool": HostPool("layer_first")}]
)
def test_other_weights_dtypes_and_layouts_find_nothing(start, other):
    backend, pages = start(), pages_of("a", 4)
    stored(backend, pages)
    backend.close()
    second = start(**other)
    assert second.batch_exists(pages) == 0 and loaded(second, pages) == [False] * 4
    stored(second, pages)
    second.close()
    first = start()
    assert loaded(first, pages) == [True] * 4


def test_another_weights_file_under_the_same_name_finds_nothing(start, tmp_path):
    model, pages = tmp_path / "model", pages_of("a", 4)
    model.mkdir()
    (model / "config.json").write_text("{}")
    for content, hits in ((b"one", 0), (b"two", 0), (b"one", 4)):
        (model / "model.safetensors").write_bytes(content)
        backend = start(identity=None, model=str(model))
        assert backend.batch_exists(pages) == hits
        stored(backend, pages)
        backend.close()
    with pytest.raises(ConfigError, match='"identity"'):
        start(identity=None, model=str(tmp_path / "nowhere"))


def test_the_servers_arguments_belong_to_the_identity_and_none_is_optional(start, monkeypatch):
    arguments = SimpleNamespace(
        kv_cache_dtype="auto", dtype="bfloat16", quantization=None, json_model_override_args="{}",
        model_path="a-model", revision=None, download_dir=None,
    )  # fmt: skip
    runtime = SimpleNamespace(get_server_args=lambda: arguments)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", runtime)
    pages = pages_of("a", 2)
    for quantization, hits in ((None, 0), ("fp8", 0), (None, 2)):
        arguments.quantization = quantization
        backend = start()
        assert backend.batch_exists(pages) == hits
        stored(backend, pages)
        backend.close()
    del arguments.kv_cache_dtype  # a version has renamed it
    with pytest.raises(ConfigError, match="this SGLang has no kv_cache_dtype "):
        start()


def test_a_damaged_page_is_false_and_what_builds_on_it_is_gone(start, tmp_path):
    pool, pages = HostPool(), pages_of("a", 6)
    backend = start(pool)
    stored(backend, pages)
    piece = pool.kv_buffer[1, 3 * PAGE_TOKENS : 4 * PAGE_TOKENS].contiguous().view(torch.uint8).numpy().tobytes()
    backend.close()
    (file,) = (tmp_path / "store").glob("*/blocks/data.mdb")
    data = bytearray(file.read_bytes())
    at = data.find(piece)
    while at >= 0:  # there may be an older copy
        data[at + 100] ^= 1
        at = data.find(piece, at + 1)
    file.write_bytes(data)
    again = start()
    assert again.batch_exists(pages) == 6 and loaded(again, pages)[:4] == [True, True, True, False]
    wait_until(lambda: again.batch_exists(pages) == 3 and not again.exists(pages[5]))
    stored(again, pages)
    assert loaded(again, pages) == [True] * 6


def test_a_second_owner_is_refused_and_each_rank_has_a_folder(start, tmp_path):
    owner = start()
    with pytest.raises(StoreLockedError, match=r'in use by .*give each SGLang a "path" of its own'):
        start()
    owner.close()
    first, second, pages = start(tp_size=2), start(tp_rank=1, tp_size=2), pages_of("a", 2)
    stored(first, pages)
    assert (first.batch_exists(pages), second.batch_exists(pages)) == (2, 0)


@pytest.mark.parametrize(
    "options, says", [({"pathh": 1}, 'no "pathh"'), ({"tp_size": 2, "is_mla": True}, "dp-attention")]
)
def test_what_cannot_work_is_refused_at_the_start(start, options, says):
    with pytest.raises(ConfigError, match=says):
        start(**options)


def test_conversations_are_evicted_from_their_ends(start):
    backend = start(HostPool(num_pages=64), disk="8MiB", timeout_s=3600)  # nobody waits for what will not be stored
    chains = [pages_of(f"talk {i}", 64) for i in range(12)]
    for pages in chains:
        for begin in (0, 32):  # a part whose beginning has gone meanwhile may be refused
            part = pages[begin : begin + 32]
            backend.batch_set_v1(part, backend.mem_pool_host.compute(part), after(pages[:begin]))
    kept = [[backend.exists(page) for page in pages] for pages in chains]
    assert 0 < sum(map(sum, kept)) < 12 * 64
    assert all(found == sorted(found, reverse=True) for found in kept), "a page is there whose beginning is gone"


def test_other_pools_have_pages_of_their_own_and_shorten_what_is_found(start):
    backend, states, pages = start(), HostPool("layer_first"), pages_of("a", 6)
    backend.register_mem_host_pool_v2(backend.mem_pool_host, PoolName.KV)
    backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    states.compute(pages)
    last = [PoolTransfer(PoolName.MAMBA, torch.arange(3 * PAGE_TOKENS, 4 * PAGE_TOKENS), keys=pages[3:4])]
    assert backend.batch_set_v2(last, after(pages[:3])) == {PoolName.MAMBA: [True]}  # before the pages, as SGLang does
    stored(backend, pages)
    trailing = PoolTransfer(PoolName.MAMBA, keys=pages[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(pages, [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4}
    assert backend.batch_exists_v2(pages, [PoolTransfer(PoolName.MAMBA)]).kv_hit_pages == 0
    states.kv_buffer.zero_()
    assert backend.batch_get_v2(last) == {PoolName.MAMBA: [True]} and states.has(pages[3], 3)
    unknown = PoolTransfer(PoolName.INDEXER, torch.arange(PAGE_TOKENS), keys=pages[:1])
    assert backend.batch_get_v2([unknown]) == backend.batch_set_v2([unknown]) == {PoolName.INDEXER: [False]}


def test_pages_without_bytes_are_there_or_not(start):
    backend, pages, indices = start(LogicalPool()), pages_of("a", 3), torch.arange(3 * PAGE_TOKENS)
    assert backend.batch_set_v1(pages[:2], indices[: 2 * PAGE_TOKENS], after(())) == [True] * 2
    assert backend.batch_get_v1(pages, indices, after(())) == [True, True, False] and backend.batch_exists(pages) == 2
    empty = torch.empty(0, dtype=torch.uint8)
    assert backend.batch_set(pages[2:], [empty]) and backend.batch_get(pages[2:], [empty]) == [empty]


def test_threads_get_their_own_pages(start):
    backend = start(HostPool(num_pages=64))

    def work(number):
        pages, at = pages_of(f"talk {number}", 8), number * 8
        indices = backend.mem_pool_host.compute(pages, at)
        ok = backend.batch_set_v1(pages, indices, after(()))
        backend.mem_pool_host.kv_buffer[:, at * PAGE_TOKENS : (at + 8) * PAGE_TOKENS] = 0
        ok += backend.batch_get_v1(pages, indices, after(()))
        assert all(ok) and all(backend.mem_pool_host.has(page, at + i) for i, page in enumerate(pages))

    together(*(partial(work, number) for number in range(6)))


def test_while_the_disk_is_silent_all_misses_and_no_memory_is_given_back(start, tmp_path):
    first, pages = start(), pages_of("a", 4)
    stored(first, pages[:2])
    first.close()
    backend = start(timeout_s=0.2)
    (blocks,) = (tmp_path / "store").glob("*/blocks")
    results = []
    with writer_held_up(blocks) as let_go:
        indices = backend.mem_pool_host.compute(pages[2:], 2)
        thread = threading.Thread(
            target=lambda: results.extend(backend.batch_set_v1(pages[2:], indices, after(pages[:2])))
        )
        thread.start()
        wait_until(lambda: backend.batch_exists(pages) == 0)
        assert loaded_nothing(backend, pages[:2]) and thread.is_alive()
        let_go()
    thread.join()
    assert results == [True, True] and backend.batch_exists(pages) == 4


def loaded_nothing(backend, pages):
    return backend.batch_get_v1(pages, torch.arange(len(pages) * PAGE_TOKENS), after(())) == [False] * len(pages)


def test_after_it_was_closed_everything_misses_and_nobody_clears_it(start):
    backend, pages = start(), pages_of("a", 3)
    stored(backend, pages)
    with pytest.raises(StoreError, match="kvstore evict --all"):
        backend.clear()
    backend.close()
    assert backend.batch_exists(pages) == 0 and loaded(backend, pages) == [False] * 3
    assert backend.batch_set_v1(pages, torch.arange(12), after(())) == [False] * 3


class TestAgainstSGLang:
    pytestmark = needs_sglang

    def test_the_stand_in_has_sglangs_interface(self):
        import inspect

        for name, ours in vars(hicache.HiCacheStorage).items():
            if inspect.isfunction(ours) and not name.startswith("_"):
                for made in (ours, getattr(KVStoreBackend, name)):
                    assert list(inspect.signature(made).parameters) == list(
                        inspect.signature(getattr(HiCacheStorage, name)).parameters
                    ), name
        for ours, theirs in (
            (hicache.HiCacheStorageConfig, HiCacheStorageConfig),
            (hicache.HiCacheStorageExtraInfo, HiCacheStorageExtraInfo),
            (hicache.PoolTransfer, PoolTransfer),
        ):
            assert list(ours.__dataclass_fields__) == list(theirs.__dataclass_fields__)

    def test_sglangs_factory_loads_it_and_its_failures_and_delays_cost_no_bytes(self, tmp_path, monkeypatch):
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
        monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
        names = {"backend_name": "kvstore", "module_path": "kvstore.hosts.sglang", "class_name": "KVStoreBackend"}
        made = config(tmp_path / "store", identity="these weights", **names)
        pool = HostPool()
        backend = StorageBackendFactory.create_backend("dynamic", made, pool)
        backend.register_mem_pool_host(pool)
        pages, num_read = pages_of("a", 8), 0
        for _ in range(40):
            backend.batch_set_v1(pages, pool.compute(pages), after(()))
            pool.kv_buffer.zero_()
            hits = backend.batch_exists(pages)
            read = backend.batch_get_v1(pages[:hits], torch.arange(hits * PAGE_TOKENS), after(()))
            assert all(pool.has(page, i) for i, (page, ok) in enumerate(zip(pages, read, strict=False)) if ok)
            num_read += sum(read)
        assert num_read > 0
        backend.close()
