"""Reading a trace: JSON lines, plain or compressed with gzip, within bounds."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from kedge.bench.sessions.records import MooncakeLinks, TraceRecord, agent_record, is_mooncake, mooncake_record
from kedge.bench.sessions.trace_fields import TraceLine, bad_line
from kedge.errors import ConfigError

MAX_LINES = 1_000_000
MAX_LINE_BYTES = 4 << 20
MAX_BLOCKS = 1 << 25
"""Blocks of all prompts of a trace."""
_GZIP = b"\x1f\x8b"


def read_trace(file: Path) -> list[TraceRecord]:
    """Return all requests of a trace in the order of the file, whose first line decides about its format.

    Raises `ConfigError` for a file that cannot be read, has no request or exceeds a bound, and for the first bad line.
    """
    records: list[TraceRecord] = []
    links, blocks = MooncakeLinks(), 0
    for number, values in _lines(file):
        line = TraceLine(file, number, values)
        record = mooncake_record(line, links) if is_mooncake(values) else agent_record(line)
        blocks += record.blocks
        if blocks > MAX_BLOCKS:
            raise bad_line(file, number, f"the prompts up to here have more than {MAX_BLOCKS} blocks")
        records.append(record)
    if not records:
        raise ConfigError("trace", str(file), "has no request")
    return records


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbers and objects of all lines that are not blank."""
    try:
        with _opened(file) as stream:
            for number, line in _bounded_lines(file, stream):
                if line.strip():
                    yield number, _parsed(file, number, line)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("trace", str(file), f"cannot be read: {error}") from error


def _opened(file: Path) -> gzip.GzipFile | BufferedReader:
    with file.open("rb") as stream:
        is_compressed = stream.read(2) == _GZIP
    return gzip.open(file, "rb") if is_compressed else file.open("rb")


def _bounded_lines(file: Path, stream: gzip.GzipFile | BufferedReader) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number > MAX_LINES:
            raise bad_line(file, number, f"a trace has at most {MAX_LINES} lines")
        if len(line) > MAX_LINE_BYTES:
            raise bad_line(file, number, f"a line has at most {MAX_LINE_BYTES} bytes")
        yield number, line


def _parsed(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise bad_line(file, number, "is not valid JSON") from error
    if not isinstance(values, dict):
        raise bad_line(file, number, "must be a JSON object")
    return values
