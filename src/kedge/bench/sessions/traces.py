"""The two formats of a line of a trace, read into one record: that of agent traces, and Mooncake's own."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import islice
from pathlib import Path
from reprlib import Repr
from typing import Any, NoReturn

from kedge.errors import ConfigError
from kedge.structures.prefixes import common_prefix

MAX_COUNT = 1 << 31
"""Exclusive bound of ids, sizes and numbers of tokens."""
MAX_SECONDS = 1e9
_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxstring = 3, 4, 60


class TraceLine:
    """The fields of one line of a trace; every method raises `ConfigError` for a value that it does not accept."""

    def __init__(self, file: Path, number: int, values: Mapping[str, Any]) -> None:
        self._file, self._number, self._values = file, number, values

    def text(self, key: str) -> str:
        """Return a text of 1 to 200 characters."""
        value = self._values.get(key)
        if not isinstance(value, str) or not 1 <= len(value) <= 200:
            self.reject(key, "must be a text of 1 to 200 characters")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return a text as `text` does, or None where the line has none."""
        return None if self._values.get(key) is None else self.text(key)

    def count(self, key: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number from `least` to 2^31 - 1, or `default` where the line has none."""
        value = self._values.get(key, default)
        if not is_count(value) or value < least:
            self.reject(key, f"must be a whole number from {least} to {MAX_COUNT - 1}")
        return int(value)

    def number(self, key: str) -> float:
        """Return a number from 0 to 10^9."""
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
            self.reject(key, f"must be a number from 0 to {MAX_SECONDS:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a number as `number` does, or None where the line has none."""
        return None if self._values.get(key) is None else self.number(key)

    def list(self, key: str) -> list[Any]:
        """Return a list."""
        value = self._values.get(key)
        if not isinstance(value, list):
            self.reject(key, "must be a list")
        return value

    def reject(self, key: str, why: str) -> NoReturn:
        """Raise `ConfigError` for the value at `key`."""
        shown = _SHORT.repr(self._values[key]) if key in self._values else "missing"
        raise bad_line(self._file, self._number, f"{key} is {shown}, {why}")


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 0 to 2^31 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def bad_line(file: Path, number: int, why: str) -> ConfigError:
    """Return the error of a line."""
    return ConfigError("trace", str(file), f"line {number}: {why}")


BLOCK = 512
"""Tokens of a block in which traces are replayed; blocks of Mooncake's own format."""
MAX_PROMPT_BLOCKS = 1 << 17
"""Blocks of one prompt as recorded: at 64 tokens each, 8 M tokens."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request as recorded. `runs` of [first id, count] are prefix hashes of blocks of `block_size` tokens."""

    session: str
    conversation: str
    """The namespace of the ids, and what is replayed as a whole."""
    agent: str
    parent: str | None
    at: float
    """Seconds since the conversation's start."""
    seconds: float
    """Seconds that the recorded server took; 0 where unknown."""
    gap: float | None
    """Seconds between this answer and the session's next request; None where there is none, or it is unknown."""
    stop: str
    """What the answer ended with: `tool`, `user` or `?`."""
    tokens: int
    output_tokens: int
    block_size: int
    runs: tuple[tuple[int, int], ...]
    tools_tokens: int = 0
    """Tokens of the tool definitions that the prompt begins with; only at a session's first request."""
    system_tokens: int = 0
    """Tokens of the system prompt, which follows the tool definitions."""
    is_shared: bool = False
    """Whether ids match across the conversations of the file."""

    @property
    def blocks(self) -> int:
        """Number of `BLOCK`-token blocks in the prompt."""
        return sum(count for _, count in self.runs) // (BLOCK // self.block_size)

    def ids(self, step: int = 1) -> Iterator[int]:
        """Yield the last id of every `step` blocks."""
        at = step - 1
        for first, count in self.runs:
            yield from range(first + at, first + count, step)
            at = (at - count) % step


def agent_record(line: TraceLine) -> TraceRecord:
    """Return the record of a line in the format of agent traces. Raises `ConfigError`."""
    size = line.count("bs", least=1)
    if BLOCK % size:
        line.reject("bs", f"must divide {BLOCK}")
    tokens, is_first = line.count("n"), line.count("turn") == 0
    return TraceRecord(
        session=line.text("s"),
        conversation=line.text("c"),
        agent=line.text("agent"),
        parent=line.optional_text("parent"),
        at=line.number("t"),
        seconds=line.optional_number("dur") or 0.0,
        gap=line.optional_number("gap"),
        stop=line.text("why"),
        tokens=tokens,
        output_tokens=line.count("o"),
        block_size=size,
        runs=_runs(line, -(-tokens // size)),
        tools_tokens=line.count("tools", 0) if is_first else 0,
        system_tokens=line.count("system", 0) if is_first else 0,
        is_shared=line.optional_text("scope") == "file",
    )


def _runs(line: TraceLine, blocks: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of a prompt that has at most so many blocks."""
    runs, most = line.list("h"), min(blocks, MAX_PROMPT_BLOCKS)
    if not all(isinstance(run, list) and len(run) == 2 and all(map(is_count, run)) for run in runs):
        line.reject("h", "must be a list of runs [first id, count]")
    if sum(count for _, count in runs) > most:
        line.reject("h", f"must have at most {most} blocks, as many as the prompt has")
    return tuple((first, count) for first, count in runs)


class MooncakeLinks:
    """The sessions of a trace in Mooncake's own format, which names none: a request continues the session whose last
    prompt's last full block is in the new prompt, the longest one if there are several.
    """

    MIN_BLOCKS = 2
    """Full blocks from which on a prompt can be continued: a single one is what prompts of many users begin with."""

    def __init__(self) -> None:
        self._sessions: dict[int, str] = {}
        """Last full block -> session."""
        self._count = 0

    def session(self, ids: tuple[int, ...], full_blocks: int) -> str:
        """Return the session that a request belongs to, and note its blocks."""
        known = next((block for block in reversed(ids) if block in self._sessions), None)
        if known is None:
            session = f"m{self._count}"
            self._count += 1
        else:
            session = self._sessions.pop(known)
        if full_blocks >= self.MIN_BLOCKS:
            self._sessions[ids[full_blocks - 1]] = session
        return session


def is_mooncake(values: Mapping[str, Any]) -> bool:
    """Return whether a line is in Mooncake's own format."""
    return "hash_ids" in values


def mooncake_record(line: TraceLine, links: MooncakeLinks) -> TraceRecord:
    """Return the record of a line in Mooncake's own format. Raises `ConfigError`.

    Its last block may be a partial one, whose hash stands for what it has, so that it counts as a block.
    """
    tokens = line.count("input_length")
    ids, most = line.list("hash_ids"), min(-(-tokens // BLOCK), MAX_PROMPT_BLOCKS)
    if len(ids) > most or not all(map(is_count, ids)):
        line.reject("hash_ids", f"must be a list of at most {most} whole numbers")
    chain = tuple(ids)
    return TraceRecord(
        session=links.session(chain, min(tokens // BLOCK, len(chain))),
        conversation="mooncake",
        agent="?",
        parent=None,
        at=line.number("timestamp") / 1e3,
        seconds=0.0,
        gap=None,
        stop="?",
        tokens=tokens,
        output_tokens=line.count("output_length"),
        block_size=BLOCK,
        runs=tuple((block, 1) for block in chain),
    )


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


MAX_TOKENS = 200_000
"""Conversations with a longer prompt are left out, as in the reference: no engine of the usual limits serves them."""


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """A request of a conversation with its prompt as a chain of full blocks: same integer, same whole prefix."""

    record: TraceRecord
    chain: tuple[int, ...]
    fixed_blocks: int
    """Leading blocks that tool definitions and system prompt fill; what all of an agent's prompts begin with where the
    trace has no sizes of these but ids that match across conversations."""


Conversation = Sequence[TraceTurn]


def conversations(
    records: Iterable[TraceRecord], max_tokens: int | None = MAX_TOKENS, block: int = BLOCK
) -> list[Conversation]:
    """Group a trace by conversation, in order of their first requests, in blocks of `block` tokens.

    The id of a coarse block is that of its last fine one, which is exact since ids are hashes of whole prefixes. Ids of
    different conversations never match, except: tool definitions of the same size are assumed to be the same text, and
    so are system prompts of the same size behind them.
    """
    groups: dict[str, list[TraceRecord]] = {}
    for record in records:
        groups.setdefault(record.conversation, []).append(record)
    kept = [one for one in groups.values() if max_tokens is None or max(r.tokens for r in one) <= max_tokens]
    numbers: dict[Hashable, int] = {}
    found: list[Conversation] = [list(_turns(one, numbers, block)) for one in kept]
    return _with_common_prompts(found) if found and found[0][0].record.is_shared else found


def _turns(records: Sequence[TraceRecord], numbers: dict[Hashable, int], block_size: int) -> Iterator[TraceTurn]:
    """Yield the turns of a conversation; `numbers` has the integers of all blocks so far."""
    space = None if records[0].is_shared else records[0].conversation
    fixed: dict[int, Hashable] = {}
    for record in records:
        fixed.update(_fixed_keys(record))
        coarse = list(record.ids(block_size // record.block_size))
        chain = tuple(numbers.setdefault(fixed.get(block, (space, block)), len(numbers)) for block in coarse)
        yield TraceTurn(record, chain, sum(block in fixed for block in coarse))


def _fixed_keys(record: TraceRecord) -> Mapping[int, Hashable]:
    """Return what the blocks of tool definitions and system prompt are known by across conversations."""
    if not record.tools_tokens:
        return {}
    tools, system, size = record.tools_tokens, record.system_tokens, record.block_size
    return {
        block: ("tools", tools, at) if (at + 1) * size <= tools else ("system", tools, system, at)
        for at, block in enumerate(islice(record.ids(), (tools + system) // size))
    }


def _with_common_prompts(found: Sequence[Conversation]) -> list[Conversation]:
    """Set the fixed blocks of every turn to those that all prompts of its agent begin with."""
    common: dict[str, tuple[int, ...]] = {}
    for turn in (turn for one in found for turn in one):
        agent = turn.record.agent
        common[agent] = common_prefix([common.get(agent, turn.chain), turn.chain])
    return [[replace(turn, fixed_blocks=len(common[turn.record.agent])) for turn in one] for one in found]
