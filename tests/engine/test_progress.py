"""What an engine says while it starts."""

import logging

import pytest

from kvstore import Engine
from kvstore.engine.progress import STAGES
from kvstore.engine.remote_engine import RemoteEngine

TIERS = {"hbm": "4MiB"}


@pytest.mark.parametrize("kind", [Engine, RemoteEngine])
def test_the_start_is_shown_and_logged_stage_by_stage(kind, caplog, capsys):
    caplog.set_level(logging.INFO, "kvstore.engine")
    with kind(cache_tiers=TIERS, progress=True):
        assert "ready" in capsys.readouterr().err
    assert [record.message for record in caplog.records if record.message in STAGES] == list(STAGES)
    with kind(cache_tiers=TIERS):
        assert capsys.readouterr().err == ""
