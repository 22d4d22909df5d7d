"""Requests that wait for lanes: planned, granted, held back, and in the end admitted with what is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.integrations.vllm.plugin import requests as module
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.integrations.vllm.plugin.lanes import HeldBlocks, HeldJobs, LaneGrants, PassLimits
from kedge.integrations.vllm.plugin.requests import NEAR, LiveRequest, TranslationVerdict
from kedge.reuse.costs import PATIENCE
from kedge.reuse.holes import Holes
from kedge.reuse.lanes import LaneBudget
from kedge.types import ReuseMode
from tests.reuse.test_holes import SIZE, layouts, positions

HOLES: Holes = (range(10, 20), range(30, 31), range(40, 42), range(59, 60))


def candidate(name: str = "r", tokens: int = SIZE) -> LiveRequest:
    prompt = tuple(range(tokens))
    hinted = read_hints(name, prompt, None, {"kedge": {}}, ReuseMode.TRANSLATE)
    assert hinted is not None
    request: Any = SimpleNamespace(request_id=name, num_tokens=tokens, num_prompt_tokens=tokens, num_preemptions=0)
    return LiveRequest(request, hinted)


def lane_grants(candidates: dict[str, LiveRequest]) -> LaneGrants:
    """Without ends of answers and base prefills."""
    return LaneGrants(candidates, HeldJobs(HeldBlocks(1), lambda _: None))


def judged(holes: Holes = HOLES, name: str = "r") -> LiveRequest:
    found = candidate(name)
    found.take_verdict(TranslationVerdict(holes))
    return found


def test_near_holes_are_one_and_too_many_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged((range(5, 6), range(6 + NEAR - 1, 12), range(59, 60))).holes == (range(5, 12), range(59, 60))
    assert judged((range(5, 6), range(6 + NEAR, 12), range(59, 60))).holes[0] == range(5, 6)
    monkeypatch.setattr(module, "MAX_LANES", 2)
    assert judged().holes == (range(10, 20), range(30, 42), range(59, 60))


def test_a_step_without_gaps_ends_or_base_prefills_wants_no_lanes() -> None:
    candidates = {"r": judged((range(59, 60),))}
    lanes = lane_grants(candidates)
    assert not lanes.is_wanted
    candidates["s"] = judged(name="s")
    assert lanes.is_wanted
    assert lanes.holes_of(candidates["s"]) is None and lanes.holes_of(candidates["r"]) == (range(59, 60),)
    del candidates["s"]
    assert not lanes.is_wanted
    lanes.jobs._jobs.append(SimpleNamespace())  # type: ignore[arg-type]
    assert lanes.is_wanted


@given(layouts(), st.integers(0, SIZE + 5))
def test_a_plan_accounts_for_every_token_behind_the_exact_prefix(holes: Holes, computed: int) -> None:
    found = judged(holes)
    claimed = found.plan(found.holes, computed)
    assert positions(found.planned) | positions(found.written) == set(range(computed, SIZE))
    assert positions(found.planned).isdisjoint(positions(found.written))
    assert positions(found.planned) >= {position for position in positions(holes) if position >= computed}
    assert computed + claimed == (found.planned[-1].start if found.written else computed)
    hashed: list[int] = []
    for tokens in (SIZE, 7):
        found.cache_blocks(lambda _, count: hashed.append(count), tokens)
    first = found.written[0].start if found.written else SIZE
    assert hashed == [first, min(first, 7)], "nothing is hashed from the first translated token on"


class Queue:
    """Lanes with a queue of waiting requests, all of which have been judged."""

    def __init__(self, *names: str) -> None:
        self.candidates = {name: judged(name=name) for name in names}
        self.lanes = lane_grants(self.candidates)
        self.held_back = 0
        self.lanes.open(self.hold_back, PassLimits(100, 100, 16))

    def hold_back(self) -> None:
        self.held_back += 1

    def grant(self, tokens: int, rows: int, demand: int = 0, deferred: Any = ()) -> LaneBudget:
        waiting: Any = [one.request for one in self.candidates.values()]
        return self.lanes.grant(waiting, deferred, LaneBudget(tokens, rows), demand)


def test_a_granted_request_is_admitted_with_its_lanes() -> None:
    queue = Queue("r")
    assert queue.grant(30, 9) == LaneBudget(13, 3)
    found = queue.candidates["r"]
    holes = queue.lanes.holes_of(found)
    assert holes == HOLES
    assert found.plan(holes, 4) == 55
    queue.lanes.admit(found)
    assert queue.lanes.taken == (13, 3)
    assert queue.lanes.take() == ({"r": HOLES[:3]}, [])
    assert queue.lanes.taken == (0, 0) and not queue.held_back
    assert queue.grant(30, 9) == LaneBudget(0, 0), "it waits no longer"


def test_without_room_a_request_is_held_back_and_then_cut() -> None:
    queue = Queue("r")
    found = queue.candidates["r"]
    for step in range(PATIENCE):
        assert queue.grant(30, 9, demand=20) == LaneBudget(0, 0)
        assert queue.lanes.holes_of(found) is None and queue.held_back == step + 1
    assert queue.grant(30, 9, demand=20) == LaneBudget(0, 0)
    assert queue.lanes.holes_of(found) == (range(10, 60),)
    assert queue.grant(30, 9, demand=16) == LaneBudget(13, 3), "unless there is room meanwhile"


def test_a_request_that_was_not_ready_takes_nothing() -> None:
    queue = Queue("r")
    other = candidate("other", 500)
    queue.candidates = {"other": other, **queue.candidates}
    queue.lanes = lane_grants(queue.candidates)
    assert queue.grant(30, 9) == LaneBudget(0, 0), "one with 500 tokens goes first"
    assert queue.grant(30, 9, deferred={id(other.request): other.request}.values()) == LaneBudget(13, 3)
