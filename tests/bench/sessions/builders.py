"""Lines, turns and arrivals for tests, with only what a test is about."""

import gzip
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kedge.bench.sessions.arrivals import (
    SLICE,
    Arrival,
    SessionBenchSettings,
    TraceRecord,
    TraceTurn,
    Traffic,
    load_traces,
    traffic_of,
)

AGENT: Mapping[str, Any] = {
    "s": "s0", "c": "c0", "agent": "main", "parent": None, "turn": 0, "t": 0.0, "dur": 2.0, "gap": 3.0, "why": "tool",
    "n": 1024, "o": 10, "bs": 64, "h": [[0, 16]],
}  # fmt: skip
MOONCAKE: Mapping[str, Any] = {"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [3, 4, 9]}


def write(file: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write lines, compressed where the file's name says so."""
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def record(**values: Any) -> TraceRecord:
    return TraceRecord.model_validate({**AGENT, **values})


def arrival(at: float, session: str, chain: Iterable[int], stop: str = "tool", seconds: float = 0.0) -> Arrival:
    blocks = tuple(chain)
    line = record(s=session, n=512 * len(blocks), bs=512, h=[[0, len(blocks)]], why=stop, dur=seconds)
    return Arrival(at, session, TraceTurn(line, blocks, 0), blocks)


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    """Arrivals of sessions whose chains grow or begin anew, and may share their first blocks."""
    chains: dict[str, list[int]] = {}
    found, now, unused = [], 0.0, 1_000
    for _ in range(draw(st.integers(1, 30))):
        now += draw(st.sampled_from([0.0, 0.5, 3.0, 40.0]))
        session = draw(st.sampled_from("abcde"))
        chain = chains.setdefault(session, list(range(draw(st.integers(0, 3)))))
        del chain[draw(st.sampled_from([len(chain), len(chain), 2, 0])) :]
        grown = draw(st.integers(1, 4))
        chain += range(unused, unused + grown)
        unused += grown
        found.append(arrival(now, session, chain, draw(st.sampled_from(["tool", "user", "?"])), seconds=0.25))
    return found


@cache
def shipped_traffic() -> Traffic:
    """The trace that ships, as the reference simulator replays it: 8 live, gaps cut at 3,600 s, 1,000 requests."""
    (trace,) = load_traces([SLICE]).values()
    (found,) = traffic_of(trace, SessionBenchSettings(live=(8,), requests=1000))
    return found
