"""The log on stderr: one record a line, as text or as JSON. Nothing that a client sends can begin a line of its own."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
FIELDS = "fields"
"""The attribute of a log record with its fields: a mapping of names to values."""


def escaped(text: str) -> str:
    """The text with every character escaped that could end a line, move a terminal's cursor or hide text."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    short = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(character)
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, FIELDS, {})
    return found


class TextFormatter(logging.Formatter):
    """`TIME LOGGER LEVEL: MESSAGE name=value ...`. The lines of a traceback, which may quote a client, are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.message, record.asctime = record.getMessage(), self.formatTime(record)
        values = [f"{name}={_shown(value)}" for name, value in fields_of(record).items()]
        lines = [escaped(" ".join([self.formatMessage(record), *values]))]
        if record.exc_info:
            lines += ["    " + escaped(line) for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, the record's fields, and an `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        data: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            data["exception"] = self.formatException(record.exc_info)
        return json.dumps(data, default=str)  # ASCII: every control character is an escape


def _shown(value: Any) -> str:
    """A value in a line of text. A string with spaces, quotes or control characters is written as in JSON."""
    if value is None:
        return "-"
    if not isinstance(value, str):
        return str(value)
    plain = value and value.isprintable() and not any(mark in value for mark in ' "\\')
    return value if plain else json.dumps(value, ensure_ascii=False)


@contextmanager
def logging_to_stderr(level: str, format: str) -> Iterator[None]:
    """Write the log to stderr within the context. Other libraries' records below a warning are left out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root, own = logging.getLogger(), logging.getLogger("lookahead")
    before = own.level
    root.addHandler(handler)
    own.setLevel(level.upper())
    try:
        yield
    finally:
        own.setLevel(before)
        root.removeHandler(handler)
