"""The closed loop against a naive twin without a cache of blocks, and by hand where the figures are plain."""

import heapq
from dataclasses import dataclass
from random import Random

import pytest

from benchmarks.sessions.closed import (
    ClosedFigures,
    ClosedReplay,
    ClosedSettings,
    KedgeSystem,
    ServingSystem,
    closed_loop,
    main_sessions,
    systems,
)
from kedge.bench.sessions.arrivals import SLICE, Conversation, TraceTurn, load_traces
from kedge.settings import TierSettings
from tests.bench.sessions.builders import record

SHORT = ClosedSettings(warm_up=0.0, end=600.0)
TURNS = 12


def growing(first: int, step: int, gap: float = 3.0, answer: int = 100) -> Conversation:
    """A conversation whose prompts grow from `first` blocks by `step`."""
    sizes = range(first, first + TURNS * step, step)
    return [
        TraceTurn(record(n=512 * size + 7, o=answer, gap=gap, bs=512, h=[[0, size]]), tuple(range(size)), 0)
        for size in sizes
    ]


def kinds() -> list[Conversation]:
    return [growing(10, 2), growing(40, 3, 9.0), growing(25, 1, 30.0, 400), growing(5, 8, 0.5)]


def replayed(live: int, system: ServingSystem, settings: ClosedSettings = SHORT) -> ClosedFigures:
    """Figures of conversations of four kinds."""
    return ClosedReplay(kinds(), live, settings, system).run()


@dataclass
class Sole:
    """A session of the twin: how many leading blocks of it are cached, and when it was used last."""

    turns: Conversation
    at: int = 0
    cached: int = 0
    used: int = 0
    arrived: float = 0.0
    state: str = "idle"


def twin(live: int, room: int, settings: ClosedSettings) -> tuple[int, int, list[float]]:
    """First come, first served and least recently used, with a count of leading blocks for every session.

    Returns hit blocks, turns and waits.
    """
    rng, plays = Random(settings.seed), kinds()
    order = rng.sample(range(len(plays)), len(plays))
    events: list[tuple[float, int, str, Sole]] = []
    sessions: list[Sole] = []
    queue: list[Sole] = []
    number = clock = hits = turns = 0
    busy, waits = False, []

    def push(at: float, what: str, session: Sole) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at, number, what, session))

    def play(at: float) -> None:
        sessions.append(Sole(plays[order[len(sessions) % len(order)]]))
        push(at, "arrive", sessions[-1])

    for _ in range(live):
        play(rng.uniform(0, 60))
    while events and events[0][0] <= settings.end:
        now, _, what, one = heapq.heappop(events)
        line = one.turns[min(one.at, TURNS - 1)].record
        if what == "arrive":
            one.state, one.arrived = "waits", now
            queue.append(one)
        elif what == "prefilled":
            busy = False
            waits.append(now - one.arrived)
            push(now + line.output_tokens * settings.decode_seconds, "answered", one)
        else:
            one.state, clock = "idle", clock + 1
            one.used, one.cached, one.at = clock, len(one.turns[one.at].chain), one.at + 1
            if one.at < TURNS:
                push(now + min(line.gap or 0.0, settings.cap), "arrive", one)
            else:
                play(now + rng.uniform(1, 10))
        while queue and not busy:
            one = queue[0]
            turn = one.turns[one.at]
            size, answer = len(turn.chain), -(-turn.record.output_tokens // 512)
            held = sum(len(s.turns[s.at].chain) + -(-s.turns[s.at].record.output_tokens // 512)
                       for s in sessions if s.state == "runs")  # fmt: skip
            idle = sorted((s for s in sessions if s.state != "runs" and s is not one), key=lambda s: s.used)
            short = held + size + answer + sum(s.cached for s in idle) - room
            if short > sum(s.cached for s in idle):
                break
            for other in idle:
                taken = min(max(short, 0), other.cached)
                other.cached, short = other.cached - taken, short - taken
            clock += 1
            one.used, one.state, busy = clock, "runs", True
            hits, turns = hits + min(one.cached, size), turns + 1
            queue.pop(0)
            computed = max(1, turn.record.tokens - 512 * one.cached)
            push(now + computed / settings.prefill_rate, "prefilled", one)
    return hits, turns, waits + [settings.end - one.arrived for one in queue]


@pytest.mark.parametrize("live", [1, 3, 8])
@pytest.mark.parametrize("room", [120, 200, 2000])
def test_first_come_first_served_on_lru_is_what_the_twin_finds(live: int, room: int) -> None:
    settings = ClosedSettings(warm_up=0.0, end=600.0, prefill_rate=20_000.0 / live, seed=live)
    system = ServingSystem(room, TierSettings(policy="lru"))
    figures = replayed(live, system, settings)
    hits, turns, waits = twin(live, room, settings)
    assert (figures.hit_blocks, figures.turns) == (hits, turns)
    assert figures.waits == pytest.approx(waits)
    system.cache.check_integrity()


@pytest.mark.parametrize("live", [1, 8])
@pytest.mark.parametrize("room", [80, 200])
@pytest.mark.parametrize("host_times", [0, 2])
def test_blocks_are_in_their_places_whatever_is_served(live: int, room: int, host_times: int) -> None:
    system = KedgeSystem(room, TierSettings(host_memory=f"{host_times * room} blocks", backup_hits=0))
    figures = replayed(live, system, ClosedSettings(warm_up=0.0, end=300.0, prefill_rate=2_000.0))
    system.cache.check_integrity()
    assert figures.turns >= 12 and figures.hit_blocks <= figures.blocks
    assert 0 <= figures.turns + len(system.waiting) - len(figures.waits) <= 1, "all but one that is prefilled"


def test_figures_by_hand() -> None:
    figures = ClosedFigures(120.0, 3, 4, 10, [float(at) for at in range(100, 0, -1)])
    assert figures.as_json() == {"hit": 0.75, "turns_per_min": 5.0, "ttft_p50_s": 50.0, "ttft_p99_s": 99.0}
    assert ClosedFigures(60.0).as_json() == {"hit": None, "turns_per_min": 0.0, "ttft_p50_s": None, "ttft_p99_s": None}


def test_conversations_are_played_without_sub_agents_and_if_long_enough() -> None:
    sub, turns = TraceTurn(record(parent="s0"), (1,), 0), growing(1, 1)
    assert main_sessions([[sub, *turns], turns[:8], turns[:9]]) == [turns, turns[:9]]
    assert closed_loop((2,), SHORT, [turns[:3]], lambda _: None) == {}


def test_past_the_cliff_kedge_serves_more_and_nobody_waits_longer() -> None:
    """On the slice that ships, with a device that holds a sixth of what its sessions need."""
    (trace,) = load_traces([SLICE]).values()
    engine = ClosedSettings(room_tokens=600_000, warm_up=300.0, end=1500.0)
    figures = closed_loop((24,), engine, trace, lambda _: None)["24"]
    assert list(figures) == ["lru", "kedge", "kedge_host4"] == list(systems(1, 4))
    lru, kedge, host = (figures[name]["turns_per_min"] or 0.0 for name in figures)
    assert kedge > 1.5 * lru and host > 1.2 * kedge
    assert (figures["kedge"]["ttft_p99_s"] or 0.0) <= 1.05 * (figures["lru"]["ttft_p99_s"] or 0.0)
