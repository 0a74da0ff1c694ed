"""The router's log: one line an event, ``key=value`` pairs or one JSON object.

Lines say engines, turns and tags; never a prompt, an answer, a key, a handle or
a conversation ID.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

LogFormat = Literal["pairs", "json"]

LOGGER: Final = "kvloom_server"
_PAIR = re.compile(r"(\w+)=(\S*)")
_COUNTS: Final = ("_ms", "_tokens", "retries", "leases", "in_flight")
"""How names of numbers end."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def start_logging(
    *, level: str, log_format: LogFormat, path: Path | None = None
) -> logging.Handler:
    """Write the server's log to a file, or to standard error.

    Other libraries' loggers stay as they are.

    Returns:
        The handler, for :func:`stop_logging`.

    Raises:
        OSError: the file can't be written.
    """
    handler: logging.Handler = (
        logging.StreamHandler(sys.stderr)
        if path is None
        else logging.FileHandler(path, encoding="utf-8")
    )
    handler.setFormatter(JsonLines() if log_format == "json" else PairLines())
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Undo :func:`start_logging`."""
    logger = logging.getLogger(LOGGER)
    logger.removeHandler(handler)
    handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


class PairLines(logging.Formatter):
    """``time=… level=… turn=… …`` on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line = " ".join(
            (
                f"time={_time(record)}",
                f"level={record.levelname.lower()}",
                f"logger={_short(record.name)}",
                record.getMessage(),
            )
        )
        if record.exc_info:
            line += f" error={self.formatException(record.exc_info)!r}"
        return line.replace("\n", "\\n")


class JsonLines(logging.Formatter):
    """One JSON object a line; pairs become its fields, numbers are numbers."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": _short(record.name),
        }
        message = record.getMessage()
        pairs, rest = _pairs(message)
        fields = pairs | fields  # nobody's pair hides the time
        if rest:
            fields["message"] = message
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _pairs(message: str) -> tuple[dict[str, Any], bool]:
    """The pairs in a message, and whether there is more than pairs."""
    pairs: dict[str, Any] = {}
    has_more = False
    for word in message.split():
        pair = _PAIR.fullmatch(word)
        if pair is None:
            has_more = True
        elif pair[2] not in ("-", "None"):
            pairs[pair[1]] = _value(pair[1], pair[2].rstrip(":"))
    return pairs, has_more


def _value(name: str, text: str) -> str | int | float:
    # By name: a tag may happen to be digits only.
    if not name.endswith(_COUNTS) or not _NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)


def _time(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created, tz=UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _short(name: str) -> str:
    return name.removeprefix(f"{LOGGER}.")
