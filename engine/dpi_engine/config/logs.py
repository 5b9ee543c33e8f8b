"""Logging of every process: one line per record, as text or JSON, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str, fmt: str, process_name: str, stream: TextIO | None = None) -> None:
    """Send all records of at least `level` to `stream` (standard error), replacing earlier handlers.

    `fmt` is `text` (time, level, process name, message) or `json` (an object per line). Raises ValueError for a
    level or format that is not known.
    """
    if level not in LEVELS:
        raise ValueError(f"log level: expected one of {', '.join(LEVELS)}, got {level!r}")
    formatters = {"text": TextFormatter, "json": JsonFormatter}
    if fmt not in formatters:
        raise ValueError(f"log format: expected one of {', '.join(formatters)}, got {fmt!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatters[fmt](process_name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("aiohttp.server").addFilter(well_formed)


def well_formed(record: logging.LogRecord) -> bool:
    """False for what is no HTTP at all, or has a body that its headers do not fit: aiohttp logs a traceback for each,
    so any port scanner could fill the disk.
    """
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None:
        return True
    return kind.__module__ != "aiohttp.http_exceptions" and kind.__name__ != "RequestPayloadError"


class _Named(logging.Formatter):
    def __init__(self, process_name: str) -> None:
        super().__init__()
        self.process_name = process_name

    def stamp(self, record: logging.LogRecord) -> str:
        """Wall clock in UTC, to the millisecond."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"

    def trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class TextFormatter(_Named):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.stamp(record)} {record.levelname:<7} {self.process_name}: {record.getMessage()}"
        trace = self.trace(record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(_Named):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.stamp(record),
            "level": record.levelname.lower(),
            "process": self.process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := self.trace(record):
            entry["trace"] = trace
        return json.dumps(entry, ensure_ascii=False)
