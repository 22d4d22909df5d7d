"""Traces of agents, in their own format or Mooncake's, and the arrivals of many sessions that are composed of them."""

import gzip
import heapq
import itertools
import json
import random
import reprlib
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from kedge.errors import ConfigError
from kedge.structures.prefixes import common_prefix

BLOCK = 512
"""Tokens of a block in which traces are replayed; blocks of Mooncake's own format."""
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
"""An id, a size, or a number of tokens; ids are kept in 32 bits."""
Name = Annotated[str, Field(strict=True, min_length=1, max_length=200)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]


class TraceRecord(BaseModel):
    """One request as recorded, read from a line of an agent trace. `runs` of (first id, count) are prefix hashes of
    blocks of `block_size` tokens.
    """

    model_config = ConfigDict(frozen=True)

    session: Name = Field(alias="s")
    conversation: Name = Field(alias="c")
    """The namespace of the ids, and what is replayed as a whole."""
    agent: Name
    parent: Name | None = None
    turn: Count
    at: Seconds = Field(alias="t")
    """Seconds since the conversation's start."""
    duration: Seconds | None = Field(None, alias="dur")
    gap: Seconds | None = None
    """Seconds between this answer and the session's next request; None where there is none, or it is unknown."""
    stop: Name = Field(alias="why")
    """What the answer ended with: `tool`, `user` or `?`."""
    tokens: Count = Field(alias="n")
    output_tokens: Count = Field(alias="o")
    block_size: Count = Field(alias="bs")
    runs: tuple[tuple[Count, Count], ...] = Field(alias="h")
    tools: Count = 0
    """Tokens of the tool definitions that the prompt begins with."""
    system: Count = 0
    """Tokens of the system prompt, which follows them."""
    scope: Name | None = None

    @field_validator("block_size")
    @classmethod
    def _divides(cls, size: int) -> int:
        if not size or BLOCK % size:
            raise ValueError(f"must divide {BLOCK}")
        return size

    @field_validator("runs")
    @classmethod
    def _fit(cls, runs: tuple[tuple[int, int], ...], info: ValidationInfo) -> tuple[tuple[int, int], ...]:
        if sum(count for _, count in runs) > -(-info.data.get("tokens", 0) // info.data.get("block_size", 1)):
            raise ValueError("has more blocks than the prompt")
        return runs

    @property
    def seconds(self) -> float:
        """Seconds that the recorded server took; 0 where unknown."""
        return self.duration or 0.0

    @property
    def is_shared(self) -> bool:
        """Whether ids match across the conversations of the file."""
        return self.scope == "file"

    def ids(self, step: int = 1) -> Iterator[int]:
        """Yield the last id of every `step` blocks."""
        at = step - 1
        for first, count in self.runs:
            yield from range(first + at, first + count, step)
            at = (at - count) % step


class MooncakeLine(BaseModel):
    """A line in Mooncake's own format."""

    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: list[Count]

    @field_validator("hash_ids")
    @classmethod
    def _fit(cls, ids: list[int], info: ValidationInfo) -> list[int]:
        if len(ids) > -(-info.data.get("input_length", 0) // BLOCK):
            raise ValueError("has more blocks than the prompt")
        return ids

    def record(self, sessions: dict[int, str], numbers: Iterator[int]) -> TraceRecord:
        """Return the request. The format names no sessions: it continues the one of `sessions`, by the last full block
        of their last prompts, whose block is in its own prompt, the longest one if there are several; else it begins
        the next of `numbers`. Its last block may be a partial one, whose hash stands for what it has, so that it counts
        as a block.
        """
        tokens, ids = self.input_length, self.hash_ids
        known = next((block for block in reversed(ids) if block in sessions), None)
        session = f"m{next(numbers)}" if known is None else sessions.pop(known)
        full_blocks = min(tokens // BLOCK, len(ids))
        if full_blocks > 1:  # a single one is what prompts of many users begin with
            sessions[ids[full_blocks - 1]] = session
        about = {"s": session, "c": "mooncake", "agent": "?", "turn": 0, "t": self.timestamp / 1e3, "why": "?"}
        blocks = [(block, 1) for block in ids]
        return TraceRecord.model_validate({**about, "n": tokens, "o": self.output_length, "bs": BLOCK, "h": blocks})


def read_trace(file: Path) -> list[TraceRecord]:
    """Return all requests of a trace in the order of the file.

    Raises `ConfigError` for a file that cannot be read or has no request, and for the first bad line.
    """
    records: list[TraceRecord] = []
    sessions, numbers, number = dict[int, str](), itertools.count(), 0
    try:
        with file.open("rb") as raw:
            is_compressed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(file, "rb") if is_compressed else file.open("rb") as stream:
            for number, line in enumerate(stream, 1):  # noqa: B007 (errors name it)
                if line.strip():
                    values = json.loads(line)
                    is_mooncake = isinstance(values, dict) and "hash_ids" in values
                    records.append(
                        MooncakeLine.model_validate(values).record(sessions, numbers)
                        if is_mooncake
                        else TraceRecord.model_validate(values)
                    )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "it"
        why = f"{key} is {reprlib.repr(first['input'])}: {first['msg']}"
        raise ConfigError("trace", str(file), f"line {number}: {why}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("trace", str(file), f"line {number}: is not valid JSON") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("trace", str(file), f"cannot be read: {error}") from error
    if not records:
        raise ConfigError("trace", str(file), "has no request")
    return records


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


def conversations(records: Iterable[TraceRecord]) -> list[Conversation]:
    """Group a trace by conversation, in order of their first requests, in blocks of `BLOCK` tokens.

    The id of a coarse block is that of its last fine one, which is exact since ids are hashes of whole prefixes. Ids of
    different conversations never match, except: tool definitions of the same size are assumed to be the same text, and
    so are system prompts of the same size behind them.
    """
    groups: dict[str, list[TraceRecord]] = {}
    for record in records:
        groups.setdefault(record.conversation, []).append(record)
    kept = [one for one in groups.values() if max(record.tokens for record in one) <= MAX_TOKENS]
    numbers: dict[Hashable, int] = {}
    found: list[Conversation] = [list(_turns(one, numbers)) for one in kept]
    if not found or not found[0][0].record.is_shared:
        return found
    common: dict[str, tuple[int, ...]] = {}
    for turn in (turn for one in found for turn in one):
        agent = turn.record.agent
        common[agent] = common_prefix([common.get(agent, turn.chain), turn.chain])
    return [[replace(turn, fixed_blocks=len(common[turn.record.agent])) for turn in one] for one in found]


def _turns(records: Sequence[TraceRecord], numbers: dict[Hashable, int]) -> Iterator[TraceTurn]:
    """Yield the turns of a conversation; `numbers` has the integers of all blocks so far."""
    space = None if records[0].is_shared else records[0].conversation
    fixed: dict[int, Hashable] = {}  # block of tools or system prompt -> what it is known by across conversations
    for record in records:
        size = record.block_size
        tools, system = (0, 0) if record.turn else (record.tools, record.system)  # of a session's first request only
        for at, block in enumerate(itertools.islice(record.ids(), (tools + system) // size if tools else 0)):
            fixed[block] = ("tools", tools, at) if (at + 1) * size <= tools else ("system", tools, system, at)
        coarse = list(record.ids(BLOCK // size))
        chain = tuple(numbers.setdefault(fixed.get(block, (space, block)), len(numbers)) for block in coarse)
        yield TraceTurn(record, chain, sum(block in fixed for block in coarse))


START_SECONDS, PAUSE_SECONDS = 300.0, (1.0, 60.0)
"""The slots' first conversations begin within this time; the pause between two conversations of a slot."""


@dataclass(slots=True)
class Arrival:
    """A request that arrives at `at` seconds, of the session `session`, unique among all copies of conversations."""

    at: float
    session: str
    turn: TraceTurn
    chain: tuple[int, ...]


def compose(
    conversations: Sequence[Conversation], live: int, cap: float, seed: int = 0, limit: int = 6000
) -> list[Arrival]:
    """Return the first `limit` arrivals of `live` slots, each of which plays one conversation after the other.

    Gaps between the requests of a conversation are cut at `cap` seconds beyond the server's own time. Arrivals do not
    depend on what a cache does.
    """
    rng = random.Random(seed)
    order = list(range(len(conversations)))
    rng.shuffle(order)
    stride = 1 + max((block for one in conversations for turn in one for block in turn.chain), default=0)
    starts = [(rng.uniform(0, START_SECONDS), slot) for slot in range(live)]
    heapq.heapify(starts)
    arrivals: list[Arrival] = []
    for played in itertools.count():
        start, slot = starts[0]
        if played % live == 0 and sum(one.at < start for one in arrivals) >= limit:
            break
        copy, at = divmod(played, len(order))
        played_now = list(_played(conversations[order[at]], start, cap, copy, stride))
        arrivals += played_now
        end = max(start, *(one.at + one.turn.record.seconds for one in played_now))
        heapq.heapreplace(starts, (end + rng.uniform(*PAUSE_SECONDS), slot))
    return sorted(arrivals, key=lambda one: one.at)[:limit]


def _played(conversation: Conversation, start: float, cap: float, copy: int, stride: int) -> Iterator[Arrival]:
    """Yield a conversation's requests. Its copies share nothing but their fixed blocks."""
    at, before = start, None
    for turn in conversation:
        record = turn.record
        if before is not None:
            at += min(record.at - before.at, cap + before.seconds)
        before = record
        chain = turn.chain
        if copy:
            chain = (*chain[: turn.fixed_blocks], *(b + copy * stride for b in chain[turn.fixed_blocks :]))
        yield Arrival(at, f"{record.session}#{copy}", turn, chain)


def is_traffic(conversations: Sequence[Conversation]) -> bool:
    """Return whether a trace is the traffic of many users, with ids that match among all of them, as Mooncake's."""
    roots = {turn.record.session for one in conversations for turn in one if turn.record.parent is None}
    return len(conversations) == 1 and len(roots) > 1


def working_set(arrivals: Sequence[Arrival]) -> float:
    """Return the mean number of blocks in the last prompts of sessions that are not over, without the first fifth."""
    over_at = {one.session: one.at for one in arrivals}
    last: dict[str, int] = {}
    totals = []
    for one in arrivals:
        last = {session: blocks for session, blocks in last.items() if over_at[session] >= one.at}
        last[one.session] = len(one.chain)
        totals.append(sum(last.values()))
    return fmean(totals[len(totals) // 5 :])


SLICE = Path(__file__).parent / "data" / "claude_code_slice.jsonl.gz"
"""The trace that ships with the package."""
RECORDED = "recorded"
"""Stands for the number of live sessions of traffic that is replayed at its own times."""


@dataclass(frozen=True)
class SessionBenchSettings:
    """The size of the replays: arrivals are composed of a trace's conversations, of which `live` run at once."""

    live: tuple[int, ...] = (8, 16, 32, 48)
    capacities: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
    """Blocks of the cache over the working set."""
    cap: float = 3600.0
    """Seconds at which gaps between a session's requests are cut."""
    requests: int = 6000
    """Arrivals of each replay."""
    seed: int = 0


QUICK = SessionBenchSettings(live=(8,), capacities=(0.1, 0.25, 0.5), requests=800)


@dataclass(frozen=True)
class Traffic:
    """Arrivals of many sessions at once."""

    live: str
    """Number of live sessions, or `RECORDED`."""
    arrivals: Sequence[Arrival]
    working_set: float
    """Blocks: the mean of all live sessions' prompts together; of traffic as recorded, all different blocks."""

    def capacity(self, share: float) -> int:
        """Return the blocks of a cache that holds a share of the working set, at least one."""
        return max(1, int(self.working_set * share))


def load_traces(files: Sequence[Path]) -> dict[str, list[Conversation]]:
    """Read the conversations of traces, by the names of their files.

    Raises `ConfigError` for a bad line, two files of one name, or prompts that are all too long.
    """
    traces: dict[str, list[Conversation]] = {}
    for file in files:
        name = file.name.removesuffix(".gz").removesuffix(".jsonl")
        if name in traces:
            raise ConfigError("trace", str(file), f"is the second trace named {name}; names must differ")
        traces[name] = conversations(read_trace(file))
        if not traces[name]:
            raise ConfigError("trace", str(file), "has no conversation whose prompts are all short enough")
    return traces


def traffic_of(trace: Sequence[Conversation], settings: SessionBenchSettings) -> Iterator[Traffic]:
    """Yield a trace's arrivals by number of live sessions. Traffic of many users comes once, as recorded."""
    if is_traffic(trace):
        found = [Arrival(one.record.at, one.record.session, one, one.chain) for one in trace[0][: settings.requests]]
        arrivals = sorted(found, key=lambda one: one.at)
        yield Traffic(RECORDED, arrivals, len({block for one in arrivals for block in one.chain}))
        return
    for live in settings.live:
        arrivals = compose(trace, live, settings.cap, settings.seed, settings.requests)
        yield Traffic(str(live), arrivals, working_set(arrivals))
