"""Lines of the log: one each, readable by people or by machines, without anything that a person wrote."""

import json
import logging

import pytest

from kvstore.service.http.telling import LOGGER, log, set_up_logging
from kvstore.service.settings.serve_options import LOG_LEVELS, ServeOptions
from tests.support.service.serving import serving


def test_a_line_of_text(lines):
    log("request", {"route": "/chat", "status": 200, "seconds": 0.123456, "tenant": None})
    (line,) = lines["text"]
    assert line.endswith("Z INFO request route=/chat status=200 seconds=0.1235")


def test_a_line_of_json(lines):
    log("request", {"route": "/chat", "status": 200, "tenant": None}, logging.WARNING)
    found = json.loads(lines["json"][0])
    assert found.pop("time").endswith("Z")
    assert found == {"level": "WARNING", "message": "request", "route": "/chat", "status": 200}


@pytest.mark.parametrize("value", ["two\nlines", "a\r\x1b[31mred", 'quo"te', "a b", "é", "\u2028"])
def test_a_value_cannot_begin_a_line_of_its_own(lines, value):
    log("request", {"value": value})
    for line in (lines["text"][0], lines["json"][0]):
        assert line.isprintable() and line.isascii()
    assert json.loads(lines["json"][0])["value"] == value
    assert json.loads(lines["text"][0].partition("value=")[2]) == value


def test_a_bug_brings_its_trace(lines):
    try:
        raise ValueError("why")
    except ValueError as error:
        log("a handler failed", {}, logging.ERROR, error)
    assert "ValueError: why" in lines["text"][0]
    assert "ValueError: why" in json.loads(lines["json"][0])["trace"]
    assert "\n" not in lines["json"][0]


def test_a_requests_line_has_tokens_hits_by_tier_and_ttft_and_polls_are_told_at_debug(lines):
    LOGGER.setLevel(logging.DEBUG)
    with serving() as server:
        said = {"message": "My dog is called Rex. He likes long walks by the sea.", "max_tokens": 4}
        first = server.post("/chat", said).json()
        server.post("/chat", {"session_id": first["session_id"], "message": "Good.", "max_tokens": 2})
        prompts = {"prompt": ["one two", "three four"], "max_tokens": 3, "ignore_eos": True}
        server.post("/v1/completions", prompts)
        server.post("/v1/completions", {**prompts, "stream": True})
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
        server.get("/version")
        for path in ("/health", "/ready", "/metrics"):
            assert server.get(path).status == 200
    found = [one for one in map(json.loads, lines["json"]) if one["message"] == "request"]
    assert [one["route"] for one in found if one["level"] == "DEBUG"] == ["/health", "/ready", "/metrics"]
    found = [one for one in found if one["level"] == "INFO"]
    new, again, *both, stateless, version = found
    usage = first["usage"]
    assert (new["prompt_tokens"], new["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 < again["hbm_tokens"] == again["cached_tokens"] < again["prompt_tokens"]
    assert {again[f"{tier}_tokens"] for tier in ("cpu", "disk", "reencoded")} == {0}
    assert all(one["ttft_s"] > 0 for one in found[:-1]) and "ttft_s" not in version
    assert [one["completion_tokens"] for one in (*both, stateless)] == [6, 6, 2]
    assert f" prompt_tokens={usage['prompt_tokens']} completion_tokens=" in lines["text"][0]


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_the_level_is_the_flags(level):
    set_up_logging("text", ServeOptions(log_level=level).log_level)
    assert {logging.getLogger(name).level for name in ("kvstore", "aiohttp.server")} == {
        getattr(logging, level.upper())
    }


def test_engine_and_store_write_lines_of_the_same_form(capsys):
    set_up_logging("json", "warning")
    for name in ("kvstore.engine", "kvstore.store"):
        logging.getLogger(name).info("all is well")
        logging.getLogger(name).warning("it is lost")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [("WARNING", "it is lost")] * 2
