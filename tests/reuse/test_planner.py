"""What is translated of a prompt, and what is computed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import PlanError
from kedge.guard import EVERYTHING, GuardOrders
from kedge.reuse.costs import EngineCosts
from kedge.reuse.guard.fidelity import RUNGS
from kedge.reuse.layout import layout, next_stop, plan_key, template_of
from kedge.reuse.plan import ReusePlan, Sentinel, spans_of
from kedge.reuse.planner import SHORT_TEMPLATE, UNLEARNED, UNPROVED, UNREAD, WITHHELD, Planner
from kedge.settings import PlannerConstants
from kedge.types import GenerateRequest, Miss, ReuseMode, SampleId, Segment, Source, Span, ValueKind, WorkflowId

UNWATCHED = GuardOrders()
ALWAYS = EngineCosts(by_cost=False)
"""Translation always pays."""
LEASED = (Span(0, 4, Source.DEVICE), Span(4, 6, Source.HOST))


def kv_of(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(tokens=tokens, slice=lambda start, stop=None: None)  # noqa: ARG005


class Known:
    """Base KV of everything, and anchors by which everything is shareable but for some tokens."""

    lengths: tuple[int, ...] = ()
    """Of the prompt's segments"""
    lacks = 0
    """Last tokens of values that have no base KV"""

    def __init__(self, weak: list[int], weak_prefix: list[int]) -> None:
        self.asked = list[tuple[float | None, bool]]()
        self._estimate = SimpleNamespace(
            shareable=True, learnable=True, value=kv_of(8), prefix=kv_of(8), value_table=None, prefix_table=None,
            weak=weak, weak_prefix=weak_prefix,
        )  # fmt: skip

    def prefixes(self, *_: object) -> dict[int, object]:
        return dict(enumerate(map(kv_of, self.lengths)))

    def find(self, run: object, sample: object, tokens: tuple[int, ...], context: object) -> Any:  # noqa: ARG002
        known = tokens[: len(tokens) - self.lacks]
        return SimpleNamespace(key="base", tokens=known, kv=kv_of(len(known)))

    serving = find

    def estimate(self, _: object, __: object, weak_error: float | None = None, *, leave_out: bool = False) -> Any:
        self.asked.append((weak_error, leave_out))
        return self._estimate


class Unknown(Known):
    """Base KV of every value, but no anchors, and no base KV of the template unless `prefixes`."""

    def __init__(self, *, has_prefixes: bool, learnable: bool = True) -> None:
        super().__init__([], [])
        self._has_prefixes = has_prefixes
        self._estimate = SimpleNamespace(shareable=False, reason="no anchor", learnable=learnable)

    def prefixes(self, *_: object) -> dict[int, object] | None:  # type: ignore[override]
        return super().prefixes() if self._has_prefixes else None

    def without_offsets(self, *_: object) -> Any:
        return SimpleNamespace(
            shareable=True, value=kv_of(8), value_table=None, prefix=None,
            weak=[], weak_prefix=[],
        )  # fmt: skip


def planned(
    known: Any, *segments: Segment, guard: GuardOrders = UNWATCHED, cost: EngineCosts = ALWAYS, **policy: Any
) -> ReusePlan:
    """The plan of these segments behind 5 exact tokens."""
    planner = Planner(known, known, PlannerConstants(**policy), None, cost)
    known.lengths = (5, *(len(one.tokens) for one in segments))
    request = GenerateRequest((Segment((1,) * 5, "p0"), *segments), reuse=ReuseMode.TRANSLATE, guard=guard)
    return planner.plan(request, (Span(0, 5, Source.DEVICE),))


ANSWER = Segment((4,) * 8, "answer", SampleId.parse("agent_a@0"))


def plan_unknown(known: Unknown, guard: GuardOrders = UNWATCHED, **policy: Any) -> ReusePlan:
    """The plan of p0 (5 tokens), a question (8), p1 (6), an answer (8), p2 (4)."""
    question = Segment((2,) * 8, "question", SampleId.parse("input_question@0"))
    return planned(known, question, Segment((3,) * 6, "p1"), ANSWER, Segment((5,) * 4, "p2"), guard=guard, **policy)


@pytest.mark.parametrize("has_prefixes", [True, False])
def test_answers_are_translated_before_there_are_anchors_and_the_rest_is_learned_from(has_prefixes: bool) -> None:
    plan = plan_unknown(Unknown(has_prefixes=has_prefixes), move="unlearned")
    assert plan.computed == [*range(5, 19), *range(27, 31)], "the question, and the template behind both"
    assert [one.start for one in plan.translations] == [19]
    assert plan.teaches and plan.moved == (3,)
    assert {miss.segment: miss.reason for miss in plan.misses} == {"question": "no anchor", "p2": UNLEARNED}


def test_what_can_be_moved_always_is_and_teaches_nothing_where_the_template_behind_it_is_short() -> None:
    plan = plan_unknown(Unknown(has_prefixes=True))
    assert plan.computed == [*range(5, 19), *range(27, 31)] and not plan.moved
    assert [miss.segment for miss in plan.misses] == ["question"], "not the template, which is to be computed"


@pytest.mark.parametrize(("move", "rung", "from_anchors"), [
    ("always", None, False), ("unlearned", None, True), ("unlearned", 0, False), ("always", 1, True),
])  # fmt: skip
def test_anchors_serve_the_template_behind_a_moved_value_only_where_it_is_long(
    move: str, rung: int | None, from_anchors: bool
) -> None:
    """And the value itself only where it is moved until they are learned."""
    known, asked = Known([3], [1]), []

    def without_offsets(_: object, after: Any = None) -> Any:
        asked.append(after)
        weak = known._estimate.weak_prefix if after else []
        return SimpleNamespace(**{**vars(known._estimate), "weak": [], "weak_prefix": weak})

    known.without_offsets = without_offsets  # type: ignore[attr-defined]
    for size, is_looked_up in ((SHORT_TEMPLATE, False), (SHORT_TEMPLATE + 1, True)):
        guard, text = GuardOrders(rung=rung), Segment((5,) * size, "p1")
        plan = planned(known, ANSWER, text, guard=guard, move=move, min_translated=0)
        template = [*range(13, 13 + size)]
        if from_anchors or is_looked_up:
            assert [at for at in plan.computed if at >= 13] == [14, 12 + size]
        else:
            assert plan.computed == template
        assert (8 in plan.computed) == from_anchors, "a weak token of the value"
    assert asked == ([] if from_anchors else [None, known._estimate])


MOVED, ANCHORS = (next(number for number, rung in enumerate(RUNGS) if rung.by_anchors is by) for by in (False, True))


@pytest.mark.parametrize("move", ["always", "unlearned"])
def test_a_rung_decides_whether_answers_are_moved_or_wait_for_anchors(move: str) -> None:
    """Whatever the settings say. The question is not moved in any case."""
    known = Unknown(has_prefixes=True)
    moved = plan_unknown(known, GuardOrders(rung=MOVED), move=move)
    assert moved.computed == [*range(5, 19), *range(27, 31)] and not moved.moved
    plan = plan_unknown(known, GuardOrders(rung=ANCHORS), move=move)
    assert plan.computed == [*range(5, 31)] and not plan.translates and plan.teaches
    assert {miss.segment: miss.reason for miss in plan.misses} == {"question": "no anchor", "answer": "no anchor"}


def test_a_rung_by_anchors_has_a_weak_error_of_its_own_and_a_check_leaves_its_own_anchors_out() -> None:
    for orders, expected in (
        (UNWATCHED, (None, False)),
        (GuardOrders(rung=MOVED), (None, False)),
        (GuardOrders(rung=ANCHORS), (RUNGS[ANCHORS].weak_error, False)),
        (GuardOrders(rung=ANCHORS, held_out=True), (RUNGS[ANCHORS].weak_error, True)),
    ):
        known = Known([1], [])
        plan = plan_of_x(known, orders)
        assert set(known.asked) == {expected} and plan.computed == [6, 18]


def test_a_rung_computes_no_first_tokens_that_the_settings_ask_for() -> None:
    assert plan_of_x(Known([], []), GuardOrders(), recompute_head=2).computed == [5, 6, 13, 14, 18]
    assert plan_of_x(Known([], []), GuardOrders(rung=ANCHORS), recompute_head=2).computed == [18]


@pytest.mark.parametrize(("withheld", "is_read", "reason"), [
    (EVERYTHING, True, UNPROVED), ("answer", True, WITHHELD), (EVERYTHING, False, UNREAD), ("answer", False, UNREAD),
])  # fmt: skip
def test_a_miss_says_whether_a_value_is_new_or_withheld_or_not_proved_yet(
    withheld: str, is_read: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_read:
        monkeypatch.setattr(Planner, "has_base", lambda *_: False)
    plan = plan_unknown(Unknown(has_prefixes=True), GuardOrders(withheld=frozenset((withheld,))))
    assert {miss.segment: miss.reason for miss in plan.misses}["answer"] == reason


def test_a_value_that_is_translated_with_offsets_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its template's base KV may be missing, but nothing is to be learned as if it had no offsets."""
    monkeypatch.setattr(Known, "prefixes", lambda *_: None)
    plan = plan_with([], [])
    assert plan.translates and not plan.teaches and not plan.moved


def test_a_value_that_teaches_nothing_is_computed_all_the_same() -> None:
    plan = plan_unknown(Unknown(has_prefixes=True, learnable=False))
    assert plan.translates and not plan.teaches and not plan.moved and plan.computed[:14] == [*range(5, 19)]


@pytest.mark.parametrize("policy", [{"move": "never"}, {"min_translated": 0.5}], ids=str)
def test_a_prompt_of_which_nothing_or_too_little_is_moved_is_dense_and_teaches(policy: dict[str, Any]) -> None:
    plan = plan_unknown(Unknown(has_prefixes=True), **policy)
    assert plan.computed == [*range(5, 31)] and plan.teaches and not plan.translates and not plan.moved
    assert not planned(Unknown(has_prefixes=True), ANSWER, move="never").translates, "nor is an answer alone"


class Cost(EngineCosts):
    """Translating a segment costs as much as computing so many tokens, and base KV pays from so many readers on."""

    def __init__(self, tokens: int = 0, readers: float = 0) -> None:
        super().__init__()
        self._tokens, self._readers = tokens, readers

    def translation_pays(self, tokens: int, spared: float) -> bool:
        assert spared <= tokens
        return spared > self._tokens

    def base_pays(self, base_tokens: int, tokens: int, readers: float) -> bool:
        assert base_tokens >= tokens
        return readers >= self._readers


def plan_with(
    weak: list[int], weak_prefix: list[int], cost: EngineCosts = ALWAYS, guard: GuardOrders = UNWATCHED, **policy: int
) -> ReusePlan:
    return plan_of_x(Known(weak, weak_prefix), guard, cost, **policy)


def plan_of_x(known: Known, guard: GuardOrders, cost: EngineCosts = ALWAYS, **policy: int) -> ReusePlan:
    value = Segment((2,) * 8, "x", SampleId.parse("x@0"))
    return planned(known, value, Segment((3,) * 6, "p1"), guard=guard, cost=cost, **policy)


def test_weak_tokens_of_the_value_and_of_the_template_behind_it_are_computed() -> None:
    assert plan_with([], []).computed == [18]
    assert plan_with([1, 7], []).computed == [6, 12, 18]
    assert plan_with([], [0, 3]).computed == [13, 16, 18]
    assert plan_with([1], [3], recompute_head=1).computed == [5, 6, 13, 16, 18]


def test_the_token_of_an_answer_that_was_drawn_last_is_computed() -> None:
    """Its producer has never run it. What stands before it, and behind it, is translated all the same."""
    known, moved = Known([], []), Unknown(has_prefixes=True)
    known.lacks = moved.lacks = 1
    assert plan_of_x(known, UNWATCHED).computed == [12, 18]
    assert plan_of_x(known, GuardOrders(sentinels=2, watched=frozenset("x"))).computed[-2:] == [12, 18]
    assert planned(moved, ANSWER, Segment((5,) * 6, "p1")).computed == [*range(12, 19)]


def test_weak_tokens_are_sentinels_at_no_cost() -> None:
    plan = plan_with([1, 7], [3], guard=GuardOrders(sentinels=2))
    assert sorted(plan.sentinels) == [Sentinel(6, True), Sentinel(12, True)]
    assert plan.computed == plan_with([1, 7], [3]).computed
    assert plan_with([1, 7], [3], guard=GuardOrders(watched=frozenset("x"))).sentinels == ()


def test_translated_tokens_are_drawn_as_sentinels_of_watched_values_only() -> None:
    watched = plan_with([], [], guard=GuardOrders(sentinels=2, watched=frozenset("x")))
    (drawn,) = watched.sentinels  # at most one in eight
    assert not drawn.is_weak and watched.computed == [drawn.position, 18] and 5 <= drawn.position < 13
    assert plan_with([], [], guard=GuardOrders(sentinels=2, watched=frozenset("y"))).sentinels == ()


def test_a_segment_of_which_too_little_is_spared_is_computed() -> None:
    most = list(range(7))
    assert plan_with(most, [], Cost(0)).computed == [*range(5, 12), 18], "one token is spared"
    assert plan_with([], [0, 1, 2, 3], Cost(2)).computed == list(range(13, 19)), "the template behind it: two are"
    assert plan_with([], [0, 1, 2], Cost(2)).computed == [13, 14, 15, 18]
    assert plan_with(most, [], Cost(1)).computed == list(range(5, 19)), "nothing behind a value that is computed either"


@pytest.mark.parametrize(
    ("reuse", "refusal"), [(ReuseMode.OFF, None), (ReuseMode.EXACT, None), (ReuseMode.TRANSLATE, "no rotation")]
)
def test_exact_tokens_keep_their_source_and_all_others_are_computed(reuse: ReuseMode, refusal: str | None) -> None:
    nobody: Any = None  # is asked where nothing can be translated
    planner = Planner(nobody, nobody, PlannerConstants(), refusal, ALWAYS)
    request = GenerateRequest((Segment((1,) * 5, "p0"), Segment((2,) * 4, "x", SampleId.parse("x@0"))), reuse=reuse)
    assert planner.plan(request, LEASED).spans == (*LEASED, Span(6, 9, Source.COMPUTED))
    assert planner.plan(request, ()).spans == (Span(0, 9, Source.COMPUTED),)


# plans, and prompts that share none ----------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(list(Source)), min_size=1))
def test_spans_are_the_sources_joined(sources: list[Source]) -> None:
    spans = spans_of(sources)
    assert [span.source for span in spans for _ in range(len(span))] == sources
    assert all(a.source is not b.source for a, b in zip(spans, spans[1:], strict=False))
    plan = ReusePlan(spans)
    assert plan.computed == [i for i, source in enumerate(sources) if source is Source.COMPUTED]
    exact = sources.index(Source.TRANSLATED) if Source.TRANSLATED in sources else len(sources)
    assert plan.exact_tokens == exact
    if exact < len(sources):
        without = plan.without_translation(Miss("*", "refuted"))
        found = [span.source for span in without.spans for _ in range(len(span))]
        assert not without.teaches and found == sources[:exact] + [Source.COMPUTED] * (len(sources) - exact)


@pytest.mark.parametrize("edges", [[(1, 4)], [(0, 3), (4, 6)], [(0, 3), (2, 6)], [(0, 3), (3, 3)]])
def test_gaps_and_overlaps_are_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(PlanError):
        ReusePlan(tuple(Span(a, b, Source.COMPUTED) for a, b in edges))


def value(*tokens: int) -> Segment:
    return Segment(tokens, "q", SampleId(ValueKind.INPUT, "q"), base_context=(8,), placeholder_text=(7, 7))


PROMPT = GenerateRequest((Segment((1, 2), "p0"), value(50, 51), Segment((3, 4, 5), "p1")))


@pytest.mark.parametrize(
    "other",
    [
        replace(PROMPT, reuse=ReuseMode.TRANSLATE),
        replace(PROMPT, guard=GuardOrders(withheld=frozenset("q"))),
        replace(PROMPT, guard=GuardOrders(rung=ANCHORS)),
        replace(PROMPT, guard=GuardOrders(epoch=1)),
        replace(PROMPT, workflow=WorkflowId("other")),
        replace(PROMPT, segments=(Segment((1, 9), "p0"), *PROMPT.segments[1:])),
        replace(PROMPT, segments=(PROMPT.segments[0], replace(value(50, 51), base_context=(9,)), PROMPT.segments[2])),
    ],
)
def test_other_modes_orders_and_templates_have_plans_of_their_own(other: GenerateRequest) -> None:
    """Offsets that were measured against other base KV, or were discarded, are not used either."""
    assert plan_key(other) != plan_key(PROMPT)
    assert plan_key(replace(PROMPT, segments=(PROMPT.segments[0], value(60), PROMPT.segments[2]))) == plan_key(PROMPT)


def test_a_prompt_is_drafted_up_to_a_value_and_the_text_behind_it_and_its_template_has_names_for_values() -> None:
    head, question, text = PROMPT.segments
    prompts = [(head, question, text), (head, question), (head, question, value(60), value())]
    stops = [[next_stop(replace(PROMPT, segments=one), at) for at in range(3)] for one in prompts]
    assert stops == [[3, 3, 3], [2, 2, 2], [2, 2, 3]]
    asked = replace(PROMPT, segments=(head, question, replace(text, tokens=()), question, text))
    assert template_of(asked).tokens == (1, 2, 7, 7, 7, 7, 3, 4, 5)
    assert [one.text and one.text.index for one in layout(asked)] == [None, None, None, 4, None]
