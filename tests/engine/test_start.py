"""The start of an engine and its end; what it says of itself; what can be wrong is said before weights are read."""

import gc
import logging
import threading
import weakref
from contextlib import nullcontext

import msgspec
import pytest

from kvstore import CacheTiers, Engine, EngineStats
from kvstore.disk.directory import StoreDirectory
from kvstore.engine import engine as engine_module
from kvstore.engine.client.local import check_room
from kvstore.engine.config import EngineConfig
from kvstore.engine.model.probe import intercept
from kvstore.engine.progress import STAGES
from kvstore.errors import ConfigError, ModelError, RequestError, StoreError, StoreLockedError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.tables import NAMES, name_key
from tests.support.conversations import PARAMS, talk
from tests.support.engines import LLAMA_BLOCK_BYTES, open_engine, save_model
from tests.support.faults import constants, largest_file
from tests.support.models import make_model
from tests.support.redis_server import free_port
from tests.support.session_tables import tables_of
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}


# -- what it says ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("process", ["here", "own"])
def test_an_engine_with_all_tiers_says_what_it_is_and_does(model, redis, store, process, caplog, capsys):
    """The stages of its start; itself and its sessions; every entry that the type of its counters has, and no other."""
    caplog.set_level(logging.INFO, "kvstore.engine")
    tiers = CacheTiers("4MiB", "16MiB", "16MiB", store, remote=redis.url)
    shared = {"session_store": redis.url, "session_durability": "unchecked", "device": "cpu", "progress": True}
    with Engine(model, tiers, process=process, kv_events=f"tcp://127.0.0.1:{free_port()}", **shared) as engine:
        assert "ready" in capsys.readouterr().err
        assert [record.message for record in caplog.records if record.message in STAGES] == list(STAGES)
        name = f"Engine('{engine.facts.model_name}', window 256, "
        assert repr(engine).startswith(f"{name}hbm 4.0 MiB, ")
        chat = engine.chat("ada")
        assert repr(chat) == "ChatSession('ada', 0 turns)"
        assert {"generate", "chat", "prefetch", "flush", "stats", "admin", "close"} <= set(dir(engine))
        assert {"send", "stream", "fork", "keep_last", "set_ttl", "messages", "num_turns"} <= set(dir(chat))
        for thing in (engine, chat):
            assert [name for name in dir(thing) if name.startswith("_") or not hasattr(thing, name)] == []
            assert set(dir(thing)).isdisjoint({"core", "chats", "means", "lock", "loop", "client"})
        chat.send("Hello", PARAMS)
        engine.flush()
        stats = engine.stats()
    assert repr(engine) == f"{name}closed)"
    assert msgspec.convert(stats, EngineStats) == stats  # which drops what the type does not know
    assert set(EngineStats.__annotations__) - stats.keys() == {"replicas"} | (
        {"process"} if process == "here" else set()
    )
    assert set(EngineStats.__annotations__["sessions"].__annotations__) == stats["sessions"].keys()


def test_an_engine_with_hbm_alone_has_what_is_required_and_shows_no_start(model, capsys):
    with Engine(model, {"hbm": "4MiB"}, device="cpu") as engine:
        stats = engine.stats()
    assert msgspec.convert(stats, EngineStats) == stats and capsys.readouterr().err == ""


def test_a_session_and_its_transcript_are_shown_to_its_tenant(engine):
    def show(tenant: str) -> dict:
        return engine.admin.handle("sessions.show", {"session": {"tenant": tenant, "session_id": "ada"}})

    chat = engine.chat("ada", "acme", system="be brief")
    said = chat.send("My name is Ada.", PARAMS).text
    chat.set_ttl(3600)
    found = show("acme")
    assert found["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": said},
    ]
    assert found["session"] == engine.admin.handle("sessions", {"tenant": "acme"})["sessions"][0]
    assert found["session"]["expires_s"] == pytest.approx(found["session"]["updated_s"] + 3600)
    for tenant in ("", "other"):
        with pytest.raises(RequestError, match="there is no session 'ada'"):
            show(tenant)


# -- what is wrong -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def unreadable(tmp_path_factory):
    """Its configuration is sound; reading its weights fails."""
    folder = tmp_path_factory.mktemp("unreadable")
    save_model(folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    return str(folder)


def test_the_weights_come_last(unreadable, tmp_path):
    store = tmp_path / "store"
    with StoreDirectory.open(store), pytest.raises(StoreLockedError, match="in use by this process"):
        open_engine(unreadable, store)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match=r"is a file"):
        open_engine(unreadable, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"disk is 1000 B; give at least 1.0 MiB, or 0"):
        open_engine(unreadable, store, disk=1000)
    with pytest.raises(ConfigError, match=r"cpu is .* one block of this model needs"):
        open_engine(unreadable, store, cpu=LLAMA_BLOCK_BYTES)
    with pytest.raises(ModelError):
        open_engine(unreadable, store)
    StoreDirectory.open(store).close()  # nobody holds it


def test_a_block_as_the_configuration_tells_it(unreadable):
    import transformers

    network = transformers.AutoConfig.from_pretrained(unreadable)
    for tier, least in (("hbm", 1), ("cpu", 2), ("disk", 4)):
        sizes = {"hbm": "1MiB", "path": "store", tier: least * LLAMA_BLOCK_BYTES}
        check_room(EngineConfig(unreadable, CacheTiers(**sizes), dtype="float32"), network)
        with pytest.raises(ConfigError, match=f"{tier} is"):
            check_room(
                EngineConfig(unreadable, CacheTiers(**sizes | {tier: sizes[tier] - 1}), dtype="float32"), network
            )


def test_a_block_of_layers_of_different_shapes_is_not_guessed_from_the_configuration():
    """Two of the four layers have no KV, so a block is smaller than the configuration looks."""
    config, network = EngineConfig("gemma", CacheTiers(12 << 10), dtype="float32"), make_model("Gemma4Text small")
    assert 16 * intercept(network, 256).spec.kv_bytes_per_token == 12 << 10
    check_room(config, network.config)


# -- the end -----------------------------------------------------------------------------------------------------------
def test_a_dropped_engine_ends_at_once_without_the_collector(model, store):
    gc.collect()
    gc.disable()
    try:
        dropped = open_engine(model, store)
        chat = dropped.chat("one")
        chat.send("Hello", PARAMS)
        alive = weakref.ref(dropped)
        del chat
        del dropped
        assert alive() is None
        open_engine(model, store).close()
    finally:
        gc.enable()


def test_an_engine_that_one_of_our_threads_drops_is_closed_in_another(model, store):
    engine = open_engine(model, store)
    ended_in: list[str] = []
    runner = engine.loop.runner
    close = runner.close
    runner.close = lambda: (ended_in.append(threading.current_thread().name), close())
    thread = threading.Thread(target=engine._finalizer, name="kvstore-housekeeping")
    thread.start()
    thread.join(TIMEOUT_S)
    wait_until(lambda: ended_in)
    (ender,) = [t for t in threading.enumerate() if t.name == "engine-shut"] or [None]
    if ender is not None:
        ender.join(TIMEOUT_S)
    assert set(ended_in) == {"engine-shut"} and engine.closed
    open_engine(model, store).close()


@pytest.mark.parametrize("part", ["kvstore.engine.admin.Admin.resume", "kvstore.engine.engine.ControlServer"])
def test_a_constructor_that_fails_late_leaves_nothing_open(model, store, monkeypatch, part):
    with monkeypatch.context() as patch:
        patch.setattr(part, lambda *_: (_ for _ in ()).throw(OSError("injected")))
        with pytest.raises(OSError, match="injected") as caught:
            open_engine(model, store)
    open_engine(model, store).close()
    del caught


@pytest.mark.parametrize("is_full", [False, True], ids=["a damaged session", "a full disk"])
def test_an_expired_session_that_cannot_be_deleted_holds_up_neither_the_start_nor_others(model, tmp_path, is_full):
    with open_engine(model, tmp_path / "store") as engine:
        for name in ("first", "second"):
            chat = engine.chat(name)
            talk(chat, 1)
            chat.set_ttl(1e-6)
        if not is_full:
            with tables_of(engine.sessions) as view:
                view.put(NAMES, name_key(SessionKey("", "first")), b"nonsense")
    with constants(engine_module, ROUND_S=3600.0):
        with largest_file(1 << 13) if is_full else nullcontext():
            engine = open_engine(model, tmp_path / "store")
        with engine:
            assert engine.sessions.stats()["sessions"] == 1 + is_full
            engine.admin.resume()
            assert engine.sessions.stats()["sessions"] == 1 - is_full
