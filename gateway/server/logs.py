"""Logs of the gateway's process: one JSON object a line for machines, or text for people."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

__all__ = ["JsonFormatter", "TextFormatter", "set_up"]

_FIELDS = ("pair", "version", "instance", "rank")


class JsonFormatter(logging.Formatter):
    """`time`, `level`, `logger` and `message`; `pair`, `version`, `instance` and `rank` where a record has them."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= {name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class TextFormatter(logging.Formatter):
    """The same fields for people, behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(fields)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback of an exception."""
        values = {name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None}
        record.fields = f" ({', '.join(f'{name} {value}' for name, value in values.items())})" if values else ""
        return super().format(record)


def set_up(form: str) -> None:
    """Sends what is logged from here on to stderr; `form` is "json" or "text"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("weightcast").setLevel(logging.INFO)
    logging.raiseExceptions = False  # a full disk under the log must not end the gateway
