"""Requests that read the same value: written once, shared or copied, and the same as if each had been written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kedge.engine.local.sequence import RequestSequence
from kedge.guard import GuardOrders
from kedge.kv.segment import KVSegment
from kedge.reuse.plan import Sentinel
from kedge.settings import PlannerConstants, PlannerSettings
from kedge.types import AgentId, GenerateRequest, RequestId, ReuseMode, Segment, Source
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_translation import request, tokens

QUESTIONS = [(tokens(seed, 30), tokens(seed + 1, 24)) for seed in (70, 80)]
TRANSLATED = Source.TRANSLATED
DENSE = PlannerSettings(by_cost=False, move="never")
_ids = (RequestId(f"shared-{number}") for number in count())


def asked(of: int = 0, agent: str = "critic", run: str = "run", **sampling: object) -> GenerateRequest:
    return replace(request(*QUESTIONS[of], agent=agent, run=run, **sampling), request_id=next(_ids))


def taught(**given: object) -> Stepped:
    """An engine with offsets for two agents, and base KV of both questions that the critic has not learned from."""
    engine = Stepped(**{"planner": DENSE, **given})
    for seed in (50, 60):
        for agent in ("solver", "critic"):
            engine.serve(replace(request(tokens(seed, 30), tokens(seed + 1, 24), agent=agent), request_id=next(_ids)))
    for of in range(len(QUESTIONS)):
        engine.serve(asked(of, agent="solver"))
    engine.core.parts.cache.clear()
    return engine


@pytest.fixture
def engine() -> Iterator[Stepped]:
    yield taught()


def kv(engine: Stepped, sequence: RequestSequence) -> KVSegment:
    """The translated KV of a prompt as it is in its slots; computed KV is rounded differently in another batch."""
    assert sequence.table is not None and sequence.plan is not None
    storage, spans = engine.core.parts.storage, sequence.plan.spans
    slots = torch.cat([sequence.table.slots[span.start : span.stop] for span in spans if span.source is TRANSLATED])
    return KVSegment(storage.keys[:, slots], storage.values[:, slots])


def keys(engine: Stepped, sequence: RequestSequence, positions: Sequence[int]) -> torch.Tensor:
    """A copy of a prompt's keys at some positions."""
    assert sequence.table is not None
    return engine.core.parts.storage.keys[:, sequence.table.slots[list(positions)]]


def admitted(engine: Stepped, *requests: GenerateRequest) -> list[RequestSequence]:
    """Submit requests, and step until all have a first token."""
    sequences = [engine.submit(one) for one in requests]
    engine.until(lambda: all(one.first_token is not None for one in sequences))
    return sequences


def taken(engine: Stepped) -> int:
    return engine.core.parts.shared.tokens


def unshared(engine: Stepped, wanted: GenerateRequest) -> KVSegment:
    """The prompt's KV where nothing else runs."""
    engine.rest()
    before = taken(engine)
    (alone,) = admitted(engine, replace(wanted, request_id=next(_ids)))
    result = kv(engine, alone)
    engine.rest()
    assert taken(engine) == before
    return result


def same(one: KVSegment, other: KVSegment) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_copies_equal_what_would_have_been_written(engine: Stepped) -> None:
    first, *others = admitted(engine, *(asked(max_tokens=20) for _ in range(4)))
    assert first.plan is not None and first.plan.translates
    assert taken(engine) == 3 * first.plan.translated_tokens
    seen = [kv(engine, one) for one in (first, *others)]
    engine.rest()
    expected = unshared(engine, asked())
    assert all(same(one, expected) for one in seen)
    assert len({tuple(one.response) for one in (first, *others)}) == 1


def shared_places(one: RequestSequence, other: RequestSequence, first: int = 3) -> list[int]:
    """The places from `first` on, which is behind the fixed prompt, of the blocks that two requests hold."""
    assert one.table is not None and other.table is not None
    pairs = zip(*(table.slots[first * 16 :: 16].tolist() for table in (one.table, other.table)), strict=False)
    return [place for place, (mine, its) in enumerate(pairs, first) if mine == its]


def test_readers_hold_whole_blocks_together(engine: Stepped) -> None:
    first, *others = admitted(engine, *(asked(max_tokens=20) for _ in range(4)))
    places = shared_places(first, others[0])
    assert places and all(shared_places(first, one) == places for one in others)
    assert first.plan is not None
    assert set(places).isdisjoint(at // 16 for at in first.plan.computed), "nobody computes anything there"
    assert engine.core.parts.shared.borrowed_tokens == 3 * 16 * len(places)
    assert first.table is not None
    held = engine.leased + engine.stats("cache")["cached_blocks"]
    assert held == 4 * (len(first.table.slots) // 16) - 3 * len(places)


def test_readers_keep_what_an_aborted_one_had_written(engine: Stepped) -> None:
    first, second = admitted(engine, asked(max_tokens=40), asked(max_tokens=40))
    assert shared_places(first, second)
    before = kv(engine, second)
    engine.core.requests.end(first)
    admitted(engine, *(asked(1, agent, max_tokens=40) for agent in ("solver", "critic")))  # in what the first one had
    assert same(kv(engine, second), before)
    engine.rest()
    assert same(before, unshared(engine, asked()))


def test_a_refuted_reader_is_computed_elsewhere(engine: Stepped) -> None:
    engine.core.judge = lambda one, _: (one, one.request_id == "one")
    dense = engine.serve(replace(asked(max_tokens=30), reuse=ReuseMode.OFF)).response
    guarded = replace(asked(max_tokens=30), guard=GuardOrders(sentinels=1, watched=frozenset(("user_question",))))
    (alone,) = admitted(engine, replace(guarded, request_id=RequestId("two")))
    expected = kv(engine, alone)
    engine.core.requests.end(alone)
    first, second = admitted(engine, *(replace(guarded, request_id=RequestId(name)) for name in ("one", "two")))
    assert engine.core.parts.shared.borrowed_tokens == 16
    assert first.plan is not None and not first.plan.translates and not shared_places(first, second)
    seen = kv(engine, second)
    engine.rest()
    assert first.response == dense
    assert same(seen, expected)


def test_what_is_blended_for_the_first_is_not_blended_again(engine: Stepped) -> None:
    storage = engine.core.parts.storage
    with mock.patch.object(storage, "write", wraps=storage.write) as write:
        first, *_ = admitted(engine, *(asked(max_tokens=20) for _ in range(3)))
        assert first.plan is not None
        assert write.call_count == len(first.plan.translations)


def test_other_agents_and_other_values_are_written(engine: Stepped) -> None:
    admitted(engine, asked(0, max_tokens=20), asked(1, max_tokens=20), asked(0, agent="solver", max_tokens=20))
    assert taken(engine) == 0


def moving(agent: str, prefix: int = 33) -> GenerateRequest:
    """A request that reads the first question as the solver's prompt left it, behind a prefix of its own."""
    request = asked(agent="solver", max_tokens=20)
    own, question, *rest = request.segments
    question = replace(question, base_context=own.tokens, in_context=True)
    if agent != "solver":
        own = Segment(tokens(sum(agent.encode()), prefix), "p0")
    return replace(request, agent=AgentId(agent), segments=(own, question, *rest))


def mover(**given: object) -> Stepped:
    """An engine with the solver's KV of the first question, and its default way to use it."""
    engine = Stepped(planner=PlannerSettings(by_cost=False), **given)
    engine.serve(moving("solver"))
    engine.rest()
    return engine


def test_agents_that_move_a_value_to_the_same_positions_copy_it() -> None:
    engine, other = mover(), moving("judge")
    first, *others = admitted(engine, moving("critic"), other, moving("critic"))
    assert first.plan is not None and first.plan.translated_tokens == 30 + 9
    assert taken(engine) == 2 * 39
    seen = kv(engine, others[0])
    assert same(seen, unshared(engine, other))


def test_a_value_that_is_moved_to_other_positions_is_written() -> None:
    engine = mover()
    readers = admitted(engine, moving("critic"), moving("judge", prefix=34))
    assert all(one.plan is not None and one.plan.translated_tokens == 30 + 9 for one in readers)
    assert taken(engine) == 0


def test_a_reader_in_a_later_pass_copies_from_one_that_still_runs(engine: Stepped) -> None:
    admitted(engine, asked(max_tokens=40))
    (second,) = admitted(engine, asked(max_tokens=4))
    assert second.plan is not None and taken(engine) == second.plan.translated_tokens
    seen = kv(engine, second)
    assert same(seen, unshared(engine, asked()))


def test_an_aborted_reader_is_not_copied_from(engine: Stepped) -> None:
    (first,) = admitted(engine, asked(max_tokens=40))
    engine.core.requests.end(first)
    (second,) = admitted(engine, asked(max_tokens=40))
    assert taken(engine) == 0
    seen = kv(engine, second)
    assert same(seen, unshared(engine, asked()))


def test_a_preempted_reader_is_not_copied_from(engine: Stepped) -> None:
    (first,) = admitted(engine, asked(max_tokens=40))
    with mock.patch.object(engine.core.scheduler, "victim", return_value=first):
        assert engine.core.requests.preempt(engine.sequence(asked()))
    assert not first.written
    engine.until(lambda: first.admitted)
    (second,) = admitted(engine, asked(max_tokens=40))
    assert taken(engine) == 0
    seen = kv(engine, second)
    assert same(seen, unshared(engine, asked()))


def test_computed_positions_are_not_taken_for_translated_ones(engine: Stepped) -> None:
    """The first reader has computed its sentinels; the second has others, and reads what translation wrote there."""
    names = frozenset(("user_question", "condition_solver_current"))
    guarded = replace(asked(max_tokens=60), guard=GuardOrders(sentinels=2, watched=names))
    first, second = (admitted(engine, replace(guarded, request_id=RequestId(name)))[0] for name in ("one", "two"))
    assert first.plan is not None and second.plan is not None
    assert {one.position for one in first.plan.sentinels}.isdisjoint(one.position for one in second.plan.sentinels)
    assert taken(engine) == 9 + 5  # the template, which has no sentinels
    seen = kv(engine, second)
    engine.rest()
    (alone,) = admitted(engine, replace(guarded, request_id=RequestId("two")))
    assert same(seen, kv(engine, alone))


def test_sentinels_that_are_not_computed_yet_are_as_they_were_written(engine: Stepped) -> None:
    read: list[Mapping[Sentinel, float]] = []

    def judge(one: GenerateRequest, errors: Mapping[Sentinel, float]) -> tuple[GenerateRequest, bool]:
        read.append(errors)
        return one, False

    engine.core.judge = judge
    guarded = replace(asked(max_tokens=60), guard=GuardOrders(sentinels=2, watched=frozenset(("user_question",))))
    _, second = admitted(engine, *(replace(guarded, request_id=RequestId(name)) for name in ("one", "two")))
    assert second.plan is not None and taken(engine) == second.plan.translated_tokens
    engine.rest()
    admitted(engine, replace(guarded, request_id=RequestId("two")))
    assert read[1] == pytest.approx(read[2], rel=1e-3)


def test_a_value_that_changed_its_base_kv_is_written(engine: Stepped) -> None:
    (first,) = admitted(engine, asked(max_tokens=60))
    _, bases = engine.core.parts.learned
    value = first.request.segments[1]
    known = bases.find(first.request.run_key, value.sample, value.tokens, value.base_context)
    assert known is not None
    other = KVSegment(known.kv.keys + 1, known.kv.values + 1)
    bases.put_content(first.request.namespace, value.tokens, value.base_context, other)
    (second,) = admitted(engine, asked(max_tokens=60))
    assert second.plan is not None
    written = {one.start: one.tokens for one in second.plan.translations}
    assert taken(engine) <= second.plan.translated_tokens - written[33]
    assert not same(kv(engine, second), kv(engine, first))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ask", "abort", "step"]), st.integers(0, 7)), min_size=4, max_size=24))
def test_whatever_ends_in_between_answers_are_those_of_one_that_is_alone(steps: list[tuple[str, int]]) -> None:
    engine = taught(kv_memory="96 blocks", planner=PlannerConstants(by_cost=False, move="never", recompute_head=2))
    alone = {(of, who): engine.serve(asked(of, who)).response for of in (0, 1) for who in ("critic", "solver")}
    live: list[tuple[tuple[int, str], RequestSequence]] = []
    for step, number in steps:
        if step == "ask":
            key = number % 2, ("critic", "solver")[number // 2 % 2]
            live.append((key, engine.submit(asked(*key))))
        elif step == "abort" and live:
            engine.core.requests.end(live.pop(number % len(live))[1])
        else:
            engine.step()
        engine.core.parts.check_integrity()
    engine.rest()
    assert all(one.response == alone[key] for key, one in live)
    assert engine.leased == 0


def watched(name: str, agent: str = "critic") -> GenerateRequest:
    """A request that computes one token, drawn by its name, of the question of 30 tokens, which begins a block."""
    orders = GuardOrders(sentinels=1, watched=frozenset(("user_question",)))
    return replace(moving(agent, 32), guard=orders, request_id=RequestId(name))


@pytest.mark.parametrize("lender_computes", [False, True])
@pytest.mark.parametrize("borrower_computes", [False, True])
def test_blocks_in_which_either_computes_are_not_shared(lender_computes: bool, borrower_computes: bool) -> None:
    engine, names = mover(), dict[bool, list[str]]({False: [], True: []})
    (alone,) = admitted(engine, moving("critic", 32))
    expected = keys(engine, alone, range(32, 71))
    engine.rest()
    for name in "abcdefghijkl":
        (one,) = admitted(engine, watched(name))
        assert one.plan is not None
        names[one.plan.sentinels[0].position < 48].append(name)
        engine.core.requests.end(one)
    chosen = names[lender_computes][0], names[borrower_computes][1]
    first, second = admitted(engine, *(watched(*pair) for pair in zip(chosen, ("critic", "judge"), strict=True)))
    assert shared_places(first, second, 2) == ([] if lender_computes or borrower_computes else [2])
    assert all(is_as_written(engine, one, expected) for one in (first, second))


def is_as_written(engine: Stepped, one: RequestSequence, expected: torch.Tensor) -> bool:
    """Return whether the translated keys of a prompt, from position 32 on, are these."""
    assert one.plan is not None
    kept = [at for span in one.plan.spans if span.source is TRANSLATED for at in range(span.start, span.stop)]
    return torch.equal(keys(engine, one, kept), expected[:, [at - 32 for at in kept]])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "doubt", "abort", "step"]), st.integers(0, 7)), min_size=4, max_size=24
    )
)
@example([("doubt", 0), ("step", 0), ("step", 0), ("ask", 1), ("step", 0)])
def test_what_is_refuted_in_between_changes_no_other_answer(steps: list[tuple[str, int]]) -> None:
    """The prompts of both agents read one value at the same positions, in a pool that holds four of them."""
    engine, doubted, live = mover(kv_memory="40 blocks"), set[RequestId](), list[RequestSequence]()
    engine.core.judge = lambda one, _: (one, one.request_id in doubted)
    # All start from the same KV: what a reader that was computed in between would leave differs from that.
    engine.core.parts.runtime._bases.put_shared_text = lambda *_: None
    dense = {who: engine.serve(replace(moving(who, 32), reuse=ReuseMode.OFF)).response for who in ("critic", "judge")}
    (alone,) = admitted(engine, moving("critic", 32))
    expected = keys(engine, alone, range(32, 71))
    engine.rest()
    for step, number in steps:
        if step in ("ask", "doubt"):
            live.append(engine.submit(watched(next(_ids), ("critic", "judge")[number % 2])))
            doubted |= {live[-1].request.request_id} if step == "doubt" else set()
        elif step == "abort" and live:
            engine.core.requests.end(live.pop(number % len(live)))
        else:
            engine.step()
        for one in engine.core.scheduler.running:
            assert is_as_written(engine, one, expected), "somebody wrote into a block that it reads"
    engine.rest()
    engine.learn()
    assert all(one.response == dense[one.request.agent] for one in live if not one.receipt().translated)
    assert engine.leased == 0
