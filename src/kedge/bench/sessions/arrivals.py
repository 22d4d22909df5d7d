"""Arrivals of many sessions at once, composed of a trace's conversations; and the working set that they make."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean

from kedge.bench.sessions.traces import BLOCK, Conversation, TraceTurn, conversations, read_trace
from kedge.errors import ConfigError

START_SECONDS, PAUSE_SECONDS = 300.0, (1.0, 60.0)
"""The slots' first conversations begin within this time; the pause between two conversations of a slot."""
MAX_COPIES = 40
"""Times that a conversation is played at most."""


@dataclass(slots=True)
class Arrival:
    """A request that arrives at `at` seconds, of the session `session`, unique among all copies of conversations."""

    at: float
    session: str
    turn: TraceTurn
    chain: tuple[int, ...]
    next_at: float = inf
    """When the session's next request arrives; `inf` where it has none among these arrivals."""

    @property
    def ends_at(self) -> float:
        """When the recorded server would have answered, on the arrivals' clock."""
        return self.at + self.turn.record.seconds

    @property
    def is_last(self) -> bool:
        """Whether the session has no further request among these arrivals."""
        return self.next_at == inf


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
    for played in range(MAX_COPIES * len(order)):
        start, slot = starts[0]
        if played % live == 0 and sum(one.at < start for one in arrivals) >= limit:
            break
        copy, at = divmod(played, len(order))
        played_now = list(_played(conversations[order[at]], start, cap, copy, stride))
        arrivals += played_now
        end = max(start, *(one.ends_at for one in played_now))
        heapq.heapreplace(starts, (end + rng.uniform(*PAUSE_SECONDS), slot))
    return _linked(arrivals, limit)


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


def as_recorded(conversation: Conversation, limit: int = 6000) -> list[Arrival]:
    """Return the first `limit` arrivals of a conversation that is many users' traffic already, at their own times."""
    arrivals = [Arrival(turn.record.at, turn.record.session, turn, turn.chain) for turn in conversation[:limit]]
    return _linked(arrivals, limit)


def is_traffic(conversations: Sequence[Conversation]) -> bool:
    """Return whether a trace is the traffic of many users, with ids that match among all of them, as Mooncake's."""
    roots = {turn.record.session for one in conversations for turn in one if turn.record.parent is None}
    return len(conversations) == 1 and len(roots) > 1


def _linked(arrivals: list[Arrival], limit: int) -> list[Arrival]:
    """Sort arrivals, cut them at `limit` and note when their sessions arrive next."""
    arrivals = sorted(arrivals, key=lambda one: one.at)[:limit]
    later: dict[str, float] = {}
    for one in reversed(arrivals):
        one.next_at = later.get(one.session, inf)
        later[one.session] = one.at
    return arrivals


def working_set(arrivals: Sequence[Arrival]) -> float:
    """Return the mean number of blocks in the last prompts of sessions that are not over, without the first fifth."""
    over_at = {one.session: one.at for one in arrivals}
    last: dict[str, int] = {}
    ends: list[tuple[float, str]] = []
    total, totals = 0, []
    for one in arrivals:
        while ends and ends[0][0] < one.at:
            total -= last.pop(heapq.heappop(ends)[1])
        if one.session not in last:
            heapq.heappush(ends, (over_at[one.session], one.session))
        total += len(one.chain) - last.get(one.session, 0)
        last[one.session] = len(one.chain)
        totals.append(total)
    return fmean(totals[len(totals) // 5 :])


def distinct_blocks(arrivals: Sequence[Arrival]) -> int:
    """Return the number of different blocks in all prompts."""
    return len({block for one in arrivals for block in one.chain})


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
class SessionTrace:
    """A trace by name, ready to be replayed."""

    name: str
    conversations: Sequence[Conversation]


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


def load_traces(files: Sequence[Path], *, as_recorded: bool = False) -> list[SessionTrace]:
    """Read traces, in blocks of `BLOCK` tokens or `as_recorded`.

    Raises `ConfigError` for a bad line, two files of one name, or prompts that are all too long."""
    traces: dict[str, SessionTrace] = {}
    for file in files:
        name = file.name.removesuffix(".gz").removesuffix(".jsonl")
        if name in traces:
            raise ConfigError("trace", str(file), f"is the second trace named {name}; names must differ")
        records = read_trace(file)
        found = conversations(records, block=min(one.block_size for one in records) if as_recorded else BLOCK)
        if not found:
            raise ConfigError("trace", str(file), "has no conversation whose prompts are all short enough")
        traces[name] = SessionTrace(name, found)
    return list(traces.values())


def traffic_of(trace: SessionTrace, settings: SessionBenchSettings) -> Iterator[Traffic]:
    """Yield a trace's arrivals by number of live sessions. Traffic of many users comes once, as recorded."""
    if is_traffic(trace.conversations):
        arrivals = as_recorded(trace.conversations[0], settings.requests)
        yield Traffic(RECORDED, arrivals, distinct_blocks(arrivals))
        return
    for live in settings.live:
        arrivals = compose(trace.conversations, live, settings.cap, settings.seed, settings.requests)
        yield Traffic(str(live), arrivals, working_set(arrivals))
