"""The server's log: one line per request, as text or JSON, without anything that a person wrote."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

LOGGER = logging.getLogger("kvstore.service")


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00Z INFO message name=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        told = "".join(f" {name}={_word(value)}" for name, value in fields.items() if value is not None)
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{_stamp(record)} {record.levelname} {record.getMessage()}{told}{trace}"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {"time": _stamp(record), "level": record.levelname, "message": record.getMessage()}
        found |= {name: value for name, value in getattr(record, "fields", {}).items() if value is not None}
        if record.exc_info:
            found["trace"] = self.formatException(record.exc_info)
        return json.dumps(found)


def set_up_logging(log_format: str, level: str = "info") -> None:
    """Write lines of this level and above to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for logger in map(logging.getLogger, ("kvstore", "aiohttp.server", "opentelemetry")):
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def log(message: str, fields: Mapping[str, object], level: int = logging.INFO, error: Any = None) -> None:
    """Write one line. error: an exception whose trace follows; for bugs only."""
    LOGGER.log(level, message, exc_info=error, extra={"fields": fields})


def _stamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def _word(value: object) -> str:
    """A plain word as it is, anything else as a JSON string, so that a line stays one line."""
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text if text.isascii() and text.isprintable() and " " not in text and '"' not in text else json.dumps(text)
