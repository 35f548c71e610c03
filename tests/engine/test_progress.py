"""What an engine says while it starts, and what it says of itself."""

import logging

import pytest

from kvstore import Engine
from kvstore.engine.progress import STAGES

TIERS = {"hbm": "4MiB"}


@pytest.mark.parametrize("process", ["here", "own"])
def test_the_start_is_shown_and_logged_stage_by_stage(process, caplog, capsys):
    caplog.set_level(logging.INFO, "kvstore.engine")
    with Engine(cache_tiers=TIERS, process=process, progress=True):
        assert "ready" in capsys.readouterr().err
    assert [record.message for record in caplog.records if record.message in STAGES] == list(STAGES)
    with Engine(cache_tiers=TIERS, process=process):
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("process", ["here", "own"])
def test_an_engine_and_a_session_say_what_they_are(process):
    with Engine(cache_tiers=TIERS, process=process) as engine:
        assert repr(engine) == "Engine('kvstore-builtin', window 1024, hbm 4.0 MiB)"
        chat = engine.chat("ada")
        assert repr(chat) == "ChatSession('ada', 0 turns)"
        assert {"generate", "chat", "prefetch", "flush", "stats", "admin", "close"} <= set(dir(engine))
        assert {"send", "stream", "fork", "keep_last", "set_ttl", "messages", "num_turns"} <= set(dir(chat))
        for thing in (engine, chat):
            assert [name for name in dir(thing) if name.startswith("_") or not hasattr(thing, name)] == []
            assert set(dir(thing)).isdisjoint({"core", "chats", "means", "lock", "loop", "client"})
    assert repr(engine) == "Engine('kvstore-builtin', window 1024, closed)"
