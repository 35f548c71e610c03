"""Lines of the log: one each, readable by people or by machines, without anything that a person wrote."""

import json
import logging

import pytest

from service.logs import LOGGER, JsonFormatter, TextFormatter, log


@pytest.fixture
def lines():
    """What is logged, by both formats."""
    found: dict[str, list[str]] = {"text": [], "json": []}

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found["text"].append(TextFormatter().format(record))
            found["json"].append(JsonFormatter().format(record))

    keep, level = Keep(), LOGGER.level
    LOGGER.addHandler(keep)
    LOGGER.setLevel(logging.INFO)
    yield found
    LOGGER.removeHandler(keep)
    LOGGER.setLevel(level)


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
