"""The clusters of an agent's prompts: sessions, versions of a template, bounds; against a twin without a tree."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.policies import fixed_prompts
from kedge.policies.fixed_prompts import LEAST_GAIN, MAX_NODES, MAX_PREFIX, PrefixClusters
from kedge.types import Tokens

fresh = itertools.count(10_000)


def new(size: int) -> Tokens:
    """Tokens that no other prompt has."""
    return tuple(next(fresh) for _ in range(size))


SYSTEM = tuple(range(100))


def observe(clusters: PrefixClusters, prompts: Iterable[Tokens]) -> list[int | None]:
    lengths = []
    for prompt in prompts:
        lengths.append(clusters.observe(prompt))
        clusters.check_integrity()
    return lengths


def session(head: Tokens, turns: int) -> list[Tokens]:
    """The prompts of a session that only appends."""
    sizes = [random.Random(turns + at).randrange(5, 60) for at in range(turns)]
    return [head + body for body in itertools.accumulate(map(new, sizes))]


# sessions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [2, 50])
def test_a_session_alone_that_only_appends_has_no_fixed_part(turns: int) -> None:
    clusters = PrefixClusters(8, 3)
    assert set(observe(clusters, session(SYSTEM, turns))) == {None}


@pytest.mark.parametrize("sessions", [4, 32, 200])
@pytest.mark.parametrize("order", ["interleaved", "one after the other"])
def test_sessions_that_only_append_share_their_system_prompt(sessions: int, order: str) -> None:
    clusters = PrefixClusters(8, 3)
    turns = [session(SYSTEM, 10) for _ in range(sessions)]
    flat = itertools.chain(*(zip(*turns, strict=True) if order == "interleaved" else turns))
    lengths = observe(clusters, flat)
    first = 3 if order == "interleaved" else 30
    assert lengths == [None] * first + [100] * (10 * sessions - first)


def test_sessions_of_two_system_prompts_keep_a_length_each() -> None:
    clusters = PrefixClusters(8, 3)
    other = SYSTEM[:40] + new(110)
    turns = [session(head, 20) for head in (SYSTEM, other) * 8]
    rounds = [observe(clusters, prompts) for prompts in zip(*turns, strict=True)]
    assert all(lengths == [100, 150] * 8 for lengths in rounds[1:])


def test_a_turn_whose_last_tokens_were_written_anew_is_still_no_evidence() -> None:
    """Chat templates end a prompt with a start of the answer, which need not stand in the next prompt."""
    clusters = PrefixClusters(8, 3)
    turns = [prompt + new(3) for prompt in session(SYSTEM, 40)]
    assert set(observe(clusters, turns)) == {None}


def test_sessions_that_are_rewound_or_compacted_keep_the_fixed_part() -> None:
    clusters = PrefixClusters(8, 3)
    turns = [session(SYSTEM, 8) for _ in range(6)]
    observe(clusters, itertools.chain(*turns))
    assert observe(clusters, [turns[5][2], turns[5][4] + new(30), turns[5][4] + new(30)]) == [100] * 3, "rewound"
    assert observe(clusters, [SYSTEM + new(25), *session(SYSTEM, 5)]) == [100] * 6, "compacted"


def test_one_of_a_cluster_that_is_rewound_again_and_again_changes_no_other() -> None:
    clusters = PrefixClusters(8, 3)
    turns = [session(SYSTEM, 8) for _ in range(6)]
    observe(clusters, itertools.chain(*turns))
    observe(clusters, [turns[5][4] + new(30) for _ in range(20)])
    assert observe(clusters, [one[-1] + new(9) for one in turns[:5]] + session(SYSTEM, 3)) == [100] * 8


@pytest.mark.parametrize("first", [-5, 5])
def test_a_session_longer_than_what_is_looked_at_has_no_fixed_part(first: int) -> None:
    clusters = PrefixClusters(8, 3)
    history = new(MAX_PREFIX + 100)
    assert set(observe(clusters, [history[: MAX_PREFIX + at] for at in range(first, 100, 5)])) == {None}


# templates ----------------------------------------------------------------------------------------------------


def test_two_versions_of_a_template_have_a_length_each() -> None:
    clusters = PrefixClusters(8, 3)
    one, other = SYSTEM[:40] + new(20), SYSTEM[:40] + new(40)
    lengths = observe(clusters, [head + new(20) for head in (one, other) * 10])
    assert lengths[:8] == [None, None, None, 40, 40, 40, 60, 80], "each is believed when it was returned to three times"
    assert lengths[8:] == [60, 80] * 6


def test_a_third_version_leaves_the_others_as_they_were() -> None:
    clusters = PrefixClusters(8, 3)
    heads = [SYSTEM[:40] + new(20 * at) for at in (1, 2, 3)]
    observe(clusters, [head + new(20) for head in heads[:2] * 5])
    lengths = observe(clusters, [head + new(20) for head in heads * 5])
    assert lengths[0::3] == [60] * 5 and lengths[1::3] == [80] * 5
    assert lengths[2::3] == [40, 40, 40, 100, 100]


def test_a_few_tokens_that_begin_alike_by_chance_are_no_cluster() -> None:
    clusters = PrefixClusters(8, 3)
    words = random.Random(0).choices([(7,), (7, 8), (9,), (9, 1, 2)], k=200)
    lengths = observe(clusters, [SYSTEM + word + new(20) for word in words])
    assert set(lengths[20:]) == {100}


def test_a_prompt_that_is_fixed_as_a_whole_is_declared_until_a_session_continues_it() -> None:
    clusters = PrefixClusters(8, 3)
    assert observe(clusters, [SYSTEM] * 6) == [None] * 3 + [100] * 3
    assert observe(clusters, [SYSTEM + (7,), SYSTEM + (7,), *[SYSTEM + (7, 8)] * 9]) == [None] * 11


# bounds -------------------------------------------------------------------------------------------------------


def test_random_prompts_have_no_fixed_part_and_cost_bounded_memory() -> None:
    rng, clusters = random.Random(0), PrefixClusters(8, 3)
    calls = [tuple(rng.choices(range(50), k=rng.randrange(1, 400))) for _ in range(2000)]
    lengths = [clusters.observe(prompt) for prompt in calls]
    clusters.check_integrity()
    assert not any(lengths)


def test_a_cluster_is_not_driven_out_by_others_that_never_come_back() -> None:
    clusters = PrefixClusters(8, 3)
    other = SYSTEM[:40] + new(110)
    observe(clusters, [head + new(20) for head in (SYSTEM, other) * 10])
    observe(clusters, [SYSTEM + new(20) for _ in range(3 * MAX_NODES)])
    assert observe(clusters, [other + new(20), SYSTEM + new(20)]) == [150, 100]


def test_long_prompts_are_dropped_before_they_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_prompts, "MAX_TREE_TOKENS", 1000)
    clusters = PrefixClusters(8, 3)
    assert observe(clusters, [SYSTEM + new(200) for _ in range(50)])[3:] == [100] * 47
    assert observe(clusters, [new(1001)]) == [None]
    assert clusters.tokens <= 1000


def naive_common(one: Tokens, other: Tokens) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def wide(symbols: Iterable[int], size: int) -> Tokens:
    """Each symbol as `size` tokens, the first of which tells it from others."""
    return tuple(token for symbol in symbols for token in (symbol, *range(90, 89 + size)))


CALLS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=60)
SIZES = st.sampled_from([1, 6, LEAST_GAIN])
HEADS = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(1, 6)), min_size=1, max_size=14)
"""Beginnings of templates, and how many prompts in succession are made of each"""


@given(CALLS, SIZES, st.integers(1, 4), st.integers(1, 4))
def test_what_is_declared_is_what_enough_prompts_begin_with(
    calls: list[list[int]], size: int, window: int, m: int
) -> None:
    clusters, earlier = PrefixClusters(max(window, m), m), []
    for call in calls:
        prompt = wide(call, size)
        (length,) = observe(clusters, [prompt])
        if length is not None:
            assert sum(naive_common(one, prompt) >= length for one in earlier) >= m
        earlier.append(prompt)


@given(CALLS, SIZES)
def test_bounds_hold_after_every_prompt(calls: list[list[int]], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_prompts, "MAX_NODES", 5)
        patch.setattr(fixed_prompts, "MAX_TREE_TOKENS", 12 * size)
        lengths = observe(PrefixClusters(4, 2), [wide(call, size) for call in calls])
    assert all(length is None or length <= len(call) * size for length, call in zip(lengths, calls, strict=True))


# a twin: what the tree keeps at its nodes, kept for every prefix of every prompt -------------------------------


@dataclass
class Place:
    """What is known of one prefix: the branches that new prompts took behind it."""

    visits: dict[int, int] = field(default_factory=dict)
    returns: dict[int, int] = field(default_factory=dict)
    trusted: set[int] = field(default_factory=set)
    last: int = -1
    run: int = 0
    partings: int = 0
    doubt: int = 0
    confirmed: bool = False


class Twin:
    """The same rules in O(prompts x tokens), without a tree and without bounds."""

    def __init__(self, window: int, m: int) -> None:
        self.window, self.m = window, m
        self.places: dict[Tokens, Place] = {}
        self.ends: dict[Tokens, list[int]] = {}
        """By the last prompts of sessions: [visits, repeats; -1 where it was continued]"""

    def observe(self, prompt: Tokens) -> int | None:
        older = next((end for end in self.ends if end == prompt[: len(end)]), None)
        if older is not None and older != prompt:
            visits, _ = self.ends.pop(older)
            self.ends[prompt] = [visits, -1]
            for at in range(len(older), len(prompt)):
                token = prompt[at]
                self.places[prompt[:at]] = Place({token: visits}, {token: 0}, last=token, run=visits)
        elif older is not None:
            if self.ends[older][1] >= 0:
                self.ends[older][0] += 1
                self.ends[older][1] += 1
                self.count(prompt)
        elif not any(end[: len(prompt)] == prompt for end in self.ends):
            self.ends[prompt] = [1, 0]
            self.count(prompt)
        return self.length(prompt)

    def ends_fixed_part(self, prefix: Tokens) -> bool:
        place = self.places.get(prefix)
        repeats = self.ends.get(prefix, [0, -1])[1]
        return repeats >= self.m or (place is not None and place.confirmed)

    def count(self, prompt: Tokens) -> None:
        for at, token in enumerate(prompt):
            place = self.places.setdefault(prompt[:at], Place())
            if len(place.visits) == 1 and token not in place.visits and at:  # parts here for the first time
                (only,) = place.visits
                branch = (*prompt[:at], only)
                below = [one for one in {*self.places, *self.ends} if one[: at + 1] == branch]
                known = any(self.ends_fixed_part(one) for one in below)
                place.confirmed, place.doubt, place.trusted = known, 0, {only} if known else set()
            self.visit(place, token)

    def visit(self, place: Place, token: int) -> None:
        place.doubt = max(0, place.doubt - 1)
        if place.last == token:
            place.run += 1
        else:
            if token in place.visits:
                place.returns[token] += 1
            elif place.run > 1:
                place.doubt = self.window * min(len(place.visits), self.window)
            place.partings += place.last >= 0
            place.confirmed |= place.partings >= self.m
            place.last, place.run = token, 1
        place.visits[token] = place.visits.get(token, 0) + 1
        place.returns.setdefault(token, 0)
        if place.returns[token] >= self.m or (place.run > self.m and not place.doubt):
            place.trusted.add(token)

    def length(self, prompt: Tokens) -> int | None:
        length = None
        for at in range(len(prompt) + 1):
            if self.ends_fixed_part(prompt[:at]) and (length is None or at >= length + LEAST_GAIN):
                length = at
            place = self.places.get(prompt[:at])
            if place and at < len(prompt) and len(place.visits) > 1 and prompt[at] not in place.trusted:
                break
        return length


@given(CALLS, SIZES, st.integers(1, 4), st.integers(1, 3))
def test_the_tree_says_what_a_twin_without_one_says(calls: list[list[int]], size: int, window: int, m: int) -> None:
    clusters, twin = PrefixClusters(max(window, m), m), Twin(max(window, m), m)
    prompts = [wide(call, size) for call in calls if call]
    assert observe(clusters, prompts) == [twin.observe(prompt) for prompt in prompts]


@given(HEADS, st.sampled_from([1, LEAST_GAIN]), st.integers(1, 4), st.integers(1, 3))
def test_the_twin_agrees_on_templates(heads: list[tuple[list[int], int]], size: int, window: int, m: int) -> None:
    clusters, twin = PrefixClusters(max(window, m), m), Twin(max(window, m), m)
    prompts = [wide(head, size) + new(2) for head, count in heads for _ in range(count)]
    assert observe(clusters, prompts) == [twin.observe(prompt) for prompt in prompts]
