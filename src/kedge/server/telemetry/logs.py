"""Log lines as text or JSON, each with the id of its HTTP call."""

from __future__ import annotations

import json
import logging
import logging.config
import time
from contextvars import ContextVar
from typing import Any, Literal

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the call that is being answered; empty outside of calls and in the engine's threads."""
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "color_message"}
"""Attributes of every record; all others were passed as `extra`."""
TEXT = "%(asctime)s %(levelname)s %(name)s %(request_id)s%(message)s"


class WithCall(logging.Filter):
    """Filter that adds the call's id to a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class TextLine(logging.Formatter):
    """Formatter of a line of text."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the standard library's name)
        name = getattr(record, "request_id", "")
        return TEXT % {**vars(record), "request_id": f"{name} " if name else ""}


class JSONLine(logging.Formatter):
    """Formatter of one JSON object per line: time (UTC), level, logger, message, the call's id if there is one, the
    attributes passed as `extra`, and an exception as text."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := getattr(record, "request_id", ""):
            line["request_id"] = name
        line |= {key: value for key, value in vars(record).items() if key not in _PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(log_format: Literal["text", "json"], level: str = "INFO") -> None:
    """Send all log records of this process to stderr."""
    formatter = {"text": TextLine, "json": JSONLine}[log_format]
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"call": {"()": WithCall}},
            "formatters": {"line": {"()": formatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["call"]}},
            "root": {"level": level, "handlers": ["stderr"]},
            "loggers": {"httpx": {"level": "WARNING"}},
        }
    )
