"""What `kvstore stats` prints for a person, at several widths of the terminal."""

import re

import pytest
from rich.console import Console

from kvstore.service.command.store_tables import live_stats, show_stats

STATS = {
    "model": "a/model[bold]",
    "hbm": {"blocks": 100, "cached_blocks": 50, "evicted_blocks": 7, "block_bytes": 1 << 20},
    "cpu": {"blocks": 2000, "cached_blocks": 1500, "evicted_blocks": 12_345, "block_bytes": 1 << 20},
    "disk": {"blocks": 123_456, "bytes": 1000 << 30, "capacity_bytes": 1023 << 30, "reads": 11, "writes": 12_346},
    "store": {"saved": 1234, "loaded": 5, "disk_evictions": 3, "prefill_tokens_per_s": 5000.0},
    "sessions": {"sessions": 1000, "turns": 4321},
    "requests": {"running": 1, "waiting": 0, "finished": 99},
    "tokens": {
        "prompt_tokens": 1_000_000, "cached_tokens": 760_000,
        "cached_by_tier": {"hbm": 50_000, "cpu": 0, "disk": 700_000, "reencoded": 10_000},
    },
    "policy": {
        "policy": "auto", "in_force": {"hbm": "return", "cpu": "return"}, "num_returns_learned": 1,
        "num_conversations": 55,
    },
}  # fmt: skip


def shown(stats, capsys, width=80):
    show_stats(stats, Console(width=width, highlight=False))
    return capsys.readouterr().out


def test_the_table_fits_a_terminal_of_80_columns(capsys):
    out = shown(STATS, capsys)
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    assert "model a/model[bold]" in out
    assert re.search(r"tier +blocks +used / limit +full +hit tokens +hit rate +evicted *\n", out)
    assert re.search(r"hbm +50 +50.0 MiB / 100.0 MiB +50% +50,000 +5.0% +7 *\n", out)
    assert re.search(r"cpu +1,500 +1.5 GiB / 2.0 GiB +75% +0 +0.0% +12,345 *\n", out)
    assert re.search(r"disk +123,456 +1000.0 GiB / 1023.0 GiB +98% +700,000 +70.0% +3 *\n", out)


def test_a_wide_terminal_shows_reads_and_writes_too(capsys):
    out = shown(STATS, capsys, 120)
    assert re.search(r"evicted +reads +writes", out)
    assert re.search(r"cpu .* 5 +1,234 *\n", out) and re.search(r"disk .* 11 +12,346 *\n", out)


def test_what_is_below_the_table(capsys):
    out = shown(STATS, capsys, 120)
    assert "76.0% of 1,000,000 prompt tokens, 10,000 of them re-encoded" in out
    assert "running 1, finished 99" in out and "waiting" not in out
    assert "1,000, with 4,321 turns" in out and "prefill 5,000 tokens/s" in out
    assert "auto, now return; 1 return learned, 55 conversations" in out
    mixed = STATS["policy"] | {"in_force": {"hbm": "lru", "disk": "return"}}
    assert "auto, now lru on hbm, return on disk;" in shown(STATS | {"policy": mixed}, capsys, 120)
    assert "lru; 1 return" in shown(STATS | {"policy": mixed | {"policy": "lru"}}, capsys, 120)


@pytest.mark.parametrize(("part", "numbers", "words"), [
    ("disk", {"failures": {"read: corrupt": 2}}, "failures  read: corrupt 2"),
    ("store", {"read_failures": {"missing": 1}, "load_failures": 4}, "failures  missing 1, loads 4"),
    ("store", {"dropped_saves": 6}, "dropped   saves 6: there was no room"),
    ("disk", {"degraded": "no space\x1b"}, "degraded  the disk cannot be written: no space\n"),
    ("disk", {"broken": True}, "broken    the disk tier's file is damaged"),
])  # fmt: skip
def test_what_went_wrong_is_shown_only_then(capsys, part, numbers, words):
    assert words.split()[0] not in shown(STATS, capsys)
    out = shown(STATS | {part: STATS[part] | numbers}, capsys, 120)
    assert words in re.sub(r" +\n", "\n", out)


def test_columns_without_a_number_are_left_out(capsys):
    out = shown({"disk": {"blocks": 0, "bytes": 0, "reads": 0, "writes": 0}, "sessions": {}}, capsys, 120)
    assert re.search(r"tier +blocks +used / limit *\n", out) and re.search(r"disk +0 +0 B / – *\n", out)
    assert "0, with 0 turns" in out
    one = STATS | {"sessions": {"sessions": 1, "turns": 1}}
    assert re.search(r"sessions +1, with 1 turn *\n", shown(one, capsys))


@pytest.mark.parametrize("stats", [{}, {"hbm": {}, "disk": {"blocks": None}, "tokens": None, "policy": None}])
def test_anything_may_be_missing(capsys, stats):
    assert "0, with 0 turns" in shown(stats, capsys)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_numbers_that_are_shown_again(capsys, is_terminal):
    out = Console(width=80, highlight=False, force_terminal=is_terminal, color_system=None)
    with live_stats(out) as show:
        show(STATS)
        show(STATS | {"model": "another"})
    printed = capsys.readouterr().out
    assert "a/model[bold]" in printed and "another" in printed
    assert ("Ctrl-C ends" in printed) == is_terminal


REMOTE = {
    "url": "redis://h:6379/0", "degraded": None, "full": False, "breaks": 1, "reads": 1234, "read_bytes": 3 << 30,
    "stored": 55, "stored_bytes": 5 << 20, "failures": {"ask": 2}, "waiting_blocks": 0, "dropped_blocks": 7,
}  # fmt: skip


def test_the_remote_tier_is_shown_where_there_is_one(capsys):
    assert "remote" not in shown(STATS, capsys, 120)
    tokens = STATS["tokens"] | {"cached_by_tier": STATS["tokens"]["cached_by_tier"] | {"remote": 80_000}}
    stats = STATS | {"tokens": tokens, "remote": REMOTE}
    out = shown(stats, capsys, 120)
    assert re.search(r"remote .* 80,000 +8.0% .* 1,234 +55 *\n", out)
    assert "redis://h:6379/0 answers; 3.0 GiB read, 5.0 MiB stored; dropped 7" in out
    assert "remote ask 2" in out and "degraded" not in out
    assert max(map(len, shown(stats, capsys).splitlines())) <= 80
    out = shown(stats | {"remote": REMOTE | {"degraded": "redis://h:6379/0: no answer in time"}}, capsys, 120)
    assert "is left alone and tried again by itself" in out
    assert "the remote tier does not answer: redis://h:6379/0: no answer in time" in out
    assert "takes no more" in shown(stats | {"remote": REMOTE | {"full": True}}, capsys, 120)
