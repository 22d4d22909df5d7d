"""The two formats of a line of a trace, read into one record: that of agent traces, and Mooncake's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kedge.bench.sessions.trace_fields import TraceLine, is_count

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
