"""What is replayed: traces by name, and the arrivals that are composed of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kedge.bench.sessions.composing import Arrival, as_recorded, compose, distinct_blocks, is_traffic, working_set
from kedge.bench.sessions.reading import read_trace
from kedge.bench.sessions.records import BLOCK
from kedge.bench.sessions.turns import Conversation, conversations
from kedge.errors import ConfigError

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
