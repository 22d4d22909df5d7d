"""Which prompts are learned from, and which base KV is asked for."""

from dataclasses import replace
from operator import mul
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.anchors.anchor import PlaceholderSite, PoolKey, SampleView
from kedge.anchors.base_store import BaseStore
from kedge.anchors.offsets import rows_of
from kedge.anchors.store import AnchorStore
from kedge.guard import GuardOrders
from kedge.reuse import runtime
from kedge.reuse.costs import EngineCosts
from kedge.reuse.layout import layout, template_key
from kedge.reuse.plan import ReusePlan
from kedge.reuse.runtime import MAX_VALUES, REFRESH, UNKNOWN, Readers, Runtime
from kedge.settings import AnchorSettings, PlannerConstants
from kedge.structures.bounded import ENTRIES
from kedge.types import (
    AgentId,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunId,
    SampleId,
    Segment,
    Source,
    Span,
    TenantId,
    WorkflowId,
)
from tests.anchors.helpers import in_context, random_kv
from tests.reuse.test_planner import ALWAYS, Cost

CAPACITY, SIZE = 6, 12
ONE = random_kv(1, 0).nbytes
TENANT, FLOW = TenantId("tenant"), WorkflowId("flow")


def request(seed: int, reuse: ReuseMode = ReuseMode.TRANSLATE) -> GenerateRequest:
    """A prompt that ends with its value, so that no base KV of a template is needed."""
    value = Segment(tuple(range(seed, seed + SIZE)), "question", SampleId.parse("question@0"), base_context=(1, 2))
    segments = (Segment((5, 6, 7), "p0"), value)
    return GenerateRequest(
        segments, reuse=reuse, tenant=TENANT, workflow=FLOW, run=RunId(f"run-{seed}"), agent=AgentId("agent")
    )


class Taught:
    """A runtime whose agent has seen so many values."""

    def __init__(self, values: int, costs: EngineCosts | None = None, room: int = 1 << 30, **policy: Any) -> None:
        self.anchors = AnchorStore(AnchorSettings(capacity=CAPACITY, min_anchors=2))
        self.bases = BaseStore(room, ONE)
        self.runtime = Runtime(self.anchors, self.bases, PlannerConstants(**policy), None, costs or ALWAYS)
        for seed in range(values):
            asked, base = request(1000 + seed), random_kv(SIZE, seed)
            view = SampleView(placeholder("question"), asked.segments[1].tokens, base, ("value", seed))
            self.anchors.observe(PlaceholderSite(template_key(asked), 1), view, in_context(base, 100 + seed))

    def wants(self, times: int, *, teaches: bool = False) -> list[bool]:
        """Of so many dense prompts, which are learned from."""
        dense = self.runtime.plan(request(0), ())
        assert not dense.translates
        plan = replace(dense, teaches=teaches)
        return [self.runtime.wants_harvest(request(seed), plan) for seed in range(times)]


ALL, ONE_IN_SO_MANY = [True] * REFRESH, [*[False] * (REFRESH - 1), True]


@pytest.mark.parametrize(("values", "teaches", "learned"), [
    (0, False, ALL), (1, False, ALL), (CAPACITY - 1, False, ALL), (CAPACITY, True, ALL),
    (CAPACITY, False, ONE_IN_SO_MANY), (3 * CAPACITY, False, ONE_IN_SO_MANY),
])  # fmt: skip
def test_dense_prompts_are_learned_from_while_few_values_were_seen_or_to_teach_and_else_now_and_then(
    values: int, teaches: bool, learned: list[bool]
) -> None:
    """So that offsets follow what changes."""
    assert Taught(values).wants(5 * REFRESH, teaches=teaches) == 5 * learned


def test_what_an_agent_has_seen_says_nothing_of_another_one_with_the_same_value() -> None:
    taught = Taught(CAPACITY)
    other = replace(request(1), agent=AgentId("another"))
    plan = taught.runtime.plan(other, ())
    assert all(taught.runtime.wants_harvest(other, plan) for _ in range(2 * REFRESH))


def test_other_modes_teach_nothing_and_need_nothing_and_checks_teach_nothing() -> None:
    runtime, asked = Taught(0).runtime, request(1)
    assert runtime.wants_harvest(asked, plan := runtime.plan(asked, ()))
    assert not runtime.wants_harvest(replace(asked, guard=GuardOrders(held_out=True)), plan)
    for other in (request(1, ReuseMode.OFF), request(1, ReuseMode.EXACT)):
        assert not runtime.wants_harvest(other, runtime.plan(other, ())) and runtime.needs(other) == []


@pytest.mark.parametrize(("above", "pays"), [(SIZE - 1, True), (SIZE, False)])
def test_a_value_that_costs_less_to_compute_is_neither_learned_nor_needed(above: int, pays: bool) -> None:
    runtime, asked = Taught(0, Cost(above)).runtime, request(1)
    plan: ReusePlan = runtime.plan(asked, ())
    assert runtime.wants_harvest(asked, plan) == pays
    wanted = [(1, 2, *asked.segments[1].tokens)] if pays else []
    assert [need.tokens for need in runtime.needs(asked, is_new=True)] == wanted
    assert ("translating it would save too little time" in [miss.reason for miss in plan.misses]) == (not pays)


def test_base_kv_is_asked_for_once_enough_requests_read_values_of_the_placeholder() -> None:
    runtime, asked = Taught(CAPACITY, Cost(readers=3)).runtime, request(1)
    for _ in range(2):  # asking again makes no more readers
        assert not (runtime.needs(asked, is_new=True) or runtime.needs(asked) or runtime.prerequisites(asked, 0))
    assert len(runtime.needs(asked, is_new=True)) == 1, "the third reader"
    assert len(runtime.prerequisites(request(2), 0)) == 1, "so is the next value worth it before it is read"


@pytest.mark.parametrize(("values", "ready"), [
    (0, [False, False, False]), (1, [False, False, False]), (2, [False, False, True]), (CAPACITY, [True, True, True]),
])  # fmt: skip
def test_base_kv_is_waited_for_once_its_agent_is_known_or_can_translate_what_others_read(
    values: int, ready: list[bool]
) -> None:
    stage, asked = Taught(values).runtime, request(1)
    found = [bool(stage.prerequisites(asked, 0, of_later_readers=True))]
    for _ in range(2):
        stage.needs(asked, is_new=True)
    found += [bool(stage.prerequisites(asked, 0, of_later_readers=later)) for later in (False, True)]
    assert found == ready


@pytest.mark.parametrize("has_template", [False, True])
def test_base_kv_for_which_there_is_no_room_is_not_asked_for(has_template: bool) -> None:
    """It would be dropped before it is read, or drop what others are about to read, which is then asked for again."""
    stage = Taught(0, room=(SIZE + 4) * ONE)
    first, second = (
        replace(one, segments=(*one.segments, Segment((8,) * 4, "p1")) if has_template else one.segments)
        for one in map(request, (1, 2))
    )
    for _ in range(2):
        assert len(stage.runtime.needs(first, is_new=True)) == 1 + has_template, "once it has room, as often as asked"
        assert not stage.runtime.needs(second, is_new=True) or has_template
        assert len(stage.runtime.needs(first)) == 1 + has_template, "it is to be waited for"
        assert len(stage.runtime.needs(second)) == has_template, "the template that both have"
    for need in stage.runtime.needs(first, is_new=True):
        need.keep(random_kv(len(need.tokens), 1).slice)
    assert not stage.runtime.needs(first, is_new=True) and not stage.runtime.needs(second, is_new=True)
    stage.runtime.end_run(first.run_key)
    assert len(stage.runtime.needs(second, is_new=True)) == 1
    assert not Taught(0, room=3 * ONE).runtime.needs(first, is_new=True)


# values whose base KV is computed in an agent's prompt ----------------------------------------------------------------


def in_place(seed: int, *, agent: str = "first") -> GenerateRequest:
    """A prompt with a question whose base context is what the prompt of `first` begins with."""
    asked = request(seed)
    head, question = asked.segments
    before = head if agent == "first" else Segment((9, 9), "p0")
    question = replace(question, base_context=head.tokens, in_context=True)
    return replace(asked, segments=(before, question), agent=AgentId(agent))


class Read(Exception):
    """Something of a prompt is read."""


def leaves_base(runtime: Runtime, asked: GenerateRequest, plan: ReusePlan | None = None) -> bool:
    """Return whether something of a prompt would be kept."""

    def read(*_: int) -> Any:
        raise Read

    try:
        runtime.keep_base(asked, read, plan)
    except Read:
        return True
    return False


def test_base_kv_is_kept_from_the_prompt_that_reads_the_value_in_its_base_context() -> None:
    runtime, kv = Taught(0).runtime, random_kv(3 + SIZE, 5)
    first, other = in_place(1), in_place(1, agent="other")
    assert leaves_base(runtime, first) and runtime.needs(first) == [] and runtime.prerequisites(first, 0) == []
    assert not leaves_base(runtime, other)
    assert [need.tokens for need in runtime.prerequisites(other, 0)] == [first.tokens], "it waits for base KV"
    runtime.keep_base(other, kv.slice)
    assert runtime.needs(other, is_new=True), "nothing was kept"

    runtime.keep_base(first, kv.slice)

    assert not leaves_base(runtime, first) and runtime.needs(other) == []
    [moved] = runtime.plan(other, ()).translations
    assert moved.start == 2 and torch.equal(moved.base.keys, kv.slice(3).keys)
    assert not runtime.wants_harvest(other, runtime.plan(other, ())), "nothing is learned for it"


def test_base_kv_is_not_kept_from_what_is_translated_itself() -> None:
    runtime, first = Taught(0).runtime, in_place(1)
    spans = (Span(0, 2, Source.DEVICE), Span(2, 5, Source.TRANSLATED), Span(5, 3 + SIZE, Source.COMPUTED))
    runtime.keep_base(first, random_kv(3 + SIZE, 5).slice, ReusePlan(spans))
    assert leaves_base(runtime, first)


def test_base_kv_that_only_one_agent_reads_is_not_kept() -> None:
    runtime = Taught(0).runtime
    for seed in range(2 * MAX_VALUES):
        runtime.needs(linked(seed, "first"), is_new=True)
    assert not leaves_base(runtime, linked(3 * MAX_VALUES, "first")), "nor is the text behind it"


# template text behind values ------------------------------------------------------------------------------------------

TEXT = tuple(range(200, 209))
"""Tokens of the template behind the question"""


def linked(seed: int, agent: str, text: tuple[int, ...] = TEXT) -> GenerateRequest:
    """The prompt of `in_place`, in which `text` and an end follow the question."""
    asked = in_place(seed, agent=agent)
    return replace(asked, segments=(*asked.segments, Segment(text, "p1"), Segment((3, 3, 3, 3, 3, 3), "p2")))


class ReadTwice(Taught):
    """A runtime that has kept the question, and what follows it, from the prompt of `first`."""

    def __init__(self, costs: EngineCosts | None = None, text: tuple[int, ...] = TEXT, **policy: Any) -> None:
        super().__init__(0, costs, **policy)
        self.first, self.kv = linked(1, "first", text), random_kv(3 + SIZE + len(text) + 6, 5)
        self.runtime.keep_base(self.first, self.kv.slice)

    def moved(self, asked: GenerateRequest) -> list[tuple[int, int]]:
        """Return where a prompt's translations begin, and how many tokens each has."""
        return [(one.start, one.tokens) for one in self.runtime.plan(asked, ()).translations]


def test_text_behind_a_value_is_moved_from_the_first_prompt_of_the_run_that_computed_it() -> None:
    stage, other = ReadTwice(), linked(1, "other")
    assert stage.moved(other) == [(2, SIZE), (2 + SIZE, len(TEXT))]
    text = stage.runtime.plan(other, ()).translations[1]
    assert torch.equal(text.base.values, stage.kv.slice(3 + SIZE, 3 + SIZE + len(TEXT)).values)
    assert not text.table.blend(text.blend).any(), "it is only rotated"
    plan = stage.runtime.plan(other, ())
    assert plan.computed == [0, 1, *range(2 + SIZE + len(TEXT), other.prompt_tokens)]
    assert not leaves_base(stage.runtime, other, plan), "nothing is left to keep"


def test_of_the_first_value_only_its_base_kv_is_kept() -> None:
    """No other prompt looks for what one has of it: all that is before it is an agent's own."""
    found = ReadTwice().bases.stats()
    assert (found.values, found.templates, found.nbytes) == (1, 1, (SIZE + len(TEXT)) * ONE)


def test_a_prompt_that_moves_only_the_value_leaves_the_text_behind_it() -> None:
    stage, other = ReadTwice(), linked(1, "other", TEXT[::-1])
    plan = stage.runtime.plan(other, ())
    assert [(one.start, one.tokens) for one in plan.translations] == [(2, SIZE)]
    assert leaves_base(stage.runtime, other, plan)
    stage.runtime.keep_base(other, stage.kv.slice, plan)
    assert stage.moved(replace(other, agent=AgentId("third"))) == [(2, SIZE), (2 + SIZE, len(TEXT))]


def test_text_that_is_left_after_a_prompt_was_drafted_is_moved_if_it_is_looked_for_again() -> None:
    stage, other = ReadTwice(), linked(1, "other", TEXT[::-1])
    drafts = [stage.runtime.planner.draft(other, ()) for _ in range(2)]
    for draft in drafts:
        assert len(stage.runtime.planner.grow(draft, other, 3)) == 1
    stage.bases.put_shared_text(other.run_key, (*other.segments[1].tokens, *TEXT[::-1]), random_kv(len(TEXT), 9), "")
    added = [
        stage.runtime.planner.grow(draft, other, 4, again=again)
        for draft, again in zip(drafts, (False, True), strict=True)
    ]
    assert [[(one.start, one.tokens) for one in found] for found in added] == [[], [(2 + SIZE, len(TEXT))]]
    assert stage.runtime.planner.grow(drafts[1], other, 4, again=True) == [], "all is drafted"
    plans = [stage.runtime.planner.seal(draft) for draft in drafts]
    assert [len(plan.computed) for plan in plans] == [2 + len(TEXT) + 6, 2 + 6]


def test_text_is_moved_only_within_its_run_and_behind_the_same_text() -> None:
    stage, other = ReadTwice(), linked(1, "other")
    assert stage.moved(replace(other, run=RunId("another"))) == [(2, SIZE)]
    head, question, *rest = other.segments
    before = replace(other, segments=(head, question, Segment((4,), "p1"), question, *rest))
    assert stage.moved(before) == [(2, SIZE), (3 + SIZE, SIZE)], "what is before it is other text"
    cut = replace(question, tokens=question.tokens[:-1]), Segment((question.tokens[-1], *TEXT), "p1")
    cut_otherwise = replace(other, segments=(head, *cut, *rest[1:]))
    assert stage.runtime.planner.sample_of_reader(cut_otherwise, layout(cut_otherwise)[2]) is None
    stage.runtime.end_run(other.run_key)
    assert stage.moved(other) == [(2, SIZE)]


@pytest.mark.parametrize("size", [4, 5, 64, 65])
def test_text_is_kept_that_is_neither_short_nor_long(size: int) -> None:
    stage = ReadTwice(text=tuple(range(100, 100 + size)))
    moved = stage.moved(linked(1, "other", tuple(range(100, 100 + size))))
    assert ((2 + SIZE, size) in moved) == (size in (5, 64)), "anchors serve longer text"


def with_answer(agent: str) -> GenerateRequest:
    """The prompt of `linked`, which reads another agent's answer between its text and its end."""
    asked = linked(1, agent)
    answer = Segment(tuple(range(300, 300 + SIZE)), "answer", SampleId.parse("agent_writer@0"))
    *before, end = asked.segments
    return replace(asked, segments=(*before, answer, Segment(TEXT[::-1], "p2"), replace(end, name="p3")))


def test_a_value_is_translated_from_the_prompt_of_its_last_reader_and_learned_in_a_pool_of_that_reader() -> None:
    stage = Taught(0, move="unlearned")
    prompts = {agent: with_answer(agent) for agent in ("first", "second", "third")}
    kv = {agent: random_kv(asked.prompt_tokens, at) for at, (agent, asked) in enumerate(prompts.items())}
    for agent in ("first", "second"):
        stage.runtime.keep_base(prompts[agent], kv[agent].slice)
    for here in layout(prompts["first"])[2:5]:
        assert stage.runtime.planner.sample_of_reader(prompts["first"], here) is None
    for agent, reader in (("second", "first"), ("third", "second")):
        asked, its = prompts[agent], prompts[reader]
        for here, there in zip(layout(asked)[2:5], layout(its)[2:5], strict=True):
            found = stage.runtime.planner.sample_of_reader(asked, here)
            assert found is not None and torch.equal(found.base.keys, kv[reader].slice(there.start, there.stop).keys)
            assert found.pool.placeholder.endswith(f"<{template_key(its)}")
    template = {at: random_kv(len(layout(prompts["third"])[at]), 50 + at) for at in (2, 4, 5)}
    stage.bases.put_prefix(prompts["third"].namespace, template_key(prompts["third"]), template)
    list(stage.runtime.observe(prompts["third"], kv["third"].slice))
    learned = {pool.placeholder.partition("<")[0] for pool in stage.anchors.pools}
    assert learned == {"question", "question+", "answer", "answer+"}


def test_of_values_that_follow_each_other_each_is_learned_once_as_what_it_is() -> None:
    """The second one as the text behind the first would be learned without the text behind itself."""
    stage, prompts = Taught(0, move="unlearned"), [with_answer(agent) for agent in ("first", "second")]
    first, second = (replace(one, segments=(*one.segments[:2], *one.segments[3:])) for one in prompts)
    template = {one.index: random_kv(len(one), 50) for one in layout(second)[3:]}
    stage.bases.put_prefix(second.namespace, template_key(second), template)
    read = random_kv(first.prompt_tokens, 1).slice
    stage.runtime.keep_base(first, read)
    for plan in (None, ReusePlan.dense((), second.prompt_tokens)):
        assert [one.index for one in stage.runtime.observe(second, read, plan)] == [1, 2, 3]


def test_an_answer_that_was_moved_alone_is_not_what_its_reader_has_read() -> None:
    stage, asked = Taught(0, move="unlearned"), with_answer("first")
    sample, tokens = asked.segments[3].sample, asked.segments[3].tokens
    stage.bases.put_sample(asked.run_key, sample, tokens, random_kv(SIZE, 7))
    plan = stage.runtime.plan(asked, ())
    assert [one.blend.adds for one in plan.translations] == [False]
    stage.runtime.keep_base(asked, random_kv(asked.prompt_tokens, 1).slice, plan)
    other = with_answer("other")
    assert stage.runtime.planner.sample_of_reader(other, layout(other)[3]) is None
    assert stage.runtime.planner.sample_of_reader(other, layout(other)[2]) is not None


def test_where_nothing_is_moved_no_text_is_kept() -> None:
    stage = ReadTwice(move="never")
    stage.runtime.keep_base(linked(1, "other"), stage.kv.slice)
    assert stage.bases.stats().templates == 0


def test_text_is_computed_where_moving_it_takes_longer() -> None:
    assert ReadTwice(Cost(len(TEXT))).moved(linked(1, "other")) == [(2, SIZE)]
    assert not leaves_base(Taught(0, Cost(SIZE)).runtime, linked(1, "first")), "the value before it is computed"


def test_nothing_is_kept_for_a_prompt_without_a_run() -> None:
    runtime, asked = Taught(0).runtime, replace(linked(1, "first"), run=RunId(""))
    runtime.keep_base(asked, random_kv(asked.prompt_tokens, 5).slice)
    assert len(runtime.plan(replace(linked(1, "other"), run=RunId("")), ()).translations) == 1


# answers that were moved by rotation alone ----------------------------------------------------------------------------

AFTER = 4
"""Tokens of the template behind an answer"""


def reading(seed: int) -> GenerateRequest:
    """A prompt with an answer in the middle."""
    answer = Segment(tuple(range(seed, seed + SIZE)), "answer", SampleId.parse("agent_writer@0"))
    asked = request(seed)
    return replace(asked, segments=(asked.segments[0], answer, Segment((8,) * AFTER, "p1")))


class Moving(Taught):
    """A runtime that has read so many answers, each moved to its reader."""

    def __init__(self, answers: int, *, has_template: bool = True) -> None:
        super().__init__(0, move="unlearned")
        self.template = random_kv(AFTER, 7)
        self.real = [random_kv(3 + SIZE + AFTER, 300 + seed) for seed in range(answers)]
        self.plans = [self._read(seed, has_template) for seed in range(answers)]

    def _read(self, seed: int, has_template: bool) -> ReusePlan:
        asked = self.answered(seed)
        plan = self.runtime.plan(asked, ())
        if has_template:  # it is computed beside the first prompt
            self.bases.put_prefix(asked.namespace, template_key(asked), {2: self.template})
        if self.runtime.wants_harvest(asked, plan):
            list(self.runtime.observe(asked, self.real[seed].slice, plan))
        return plan

    def answered(self, seed: int) -> GenerateRequest:
        """The reader's prompt, once the answer's base KV is there."""
        asked = reading(seed)
        answer = asked.segments[1]
        assert answer.sample is not None
        self.bases.put_sample(asked.run_key, answer.sample, answer.tokens, random_kv(SIZE, seed))
        return asked


def test_behind_moved_answers_the_template_is_learned() -> None:
    stage = Moving(2)
    assert [plan.moved for plan in stage.plans] == [(1,), (1,)]
    found = stage.runtime.plan(stage.answered(0), ())
    value, after = found.translations
    assert value.start == 3 and after.start == 3 + SIZE and found.moved == ()
    assert not value.table.blend(value.blend).any(), "the answer itself is moved as before"
    first, second = (rows_of(one.slice(3 + SIZE, 3 + SIZE + AFTER)) - rows_of(stage.template) for one in stage.real)
    blended, share = after.table.blend(after.blend).float(), after.blend.weights[:, :1]
    assert torch.allclose(blended, share * first + (1 - share) * second, atol=1e-2), "kept in 16 bits"


def test_without_base_kv_of_the_template_moved_answers_teach_nothing() -> None:
    assert not Moving(3, has_template=False).anchors.pools


def test_an_agent_that_has_read_enough_answers_learns_no_more_from_them() -> None:
    assert [plan.teaches for plan in Moving(CAPACITY).plans][-2:] == [False, False]


# how many readers the next value of a placeholder is expected to have ------------------------------------------------


def placeholder(name: str) -> PoolKey:
    return PoolKey(Namespace(TENANT), FLOW, name)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 6)), max_size=60))
def test_a_value_has_as_many_readers_as_those_before_had_that_are_read_no_more(reads: list[tuple[str, int]]) -> None:
    """Of each placeholder, the last ones first; until something is known the most so far, or two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "MAX_VALUES", 3)
        readers = Readers()
        for name, value in reads:
            readers.read(placeholder(name), (value,))
    for name in "abc":
        counts, final, most = dict[int, int](), list[int](), 0
        for value in (value for of, value in reads if of == name):
            counts[value] = counts.pop(value, 0) + 1
            most = max(most, counts[value])
            if len(counts) > 3:
                final.insert(0, counts.pop(next(iter(counts))))
        shares = [0.98**age for age in range(len(final))]
        known = sum(map(mul, final, shares)) / sum(shares) if final else max(UNKNOWN, most)
        assert readers.expected(placeholder(name)) == pytest.approx(known)


def test_the_placeholder_that_was_read_longest_ago_is_forgotten_first() -> None:
    readers = Readers()
    for name in ("forgotten", "kept"):
        for _ in range(4):
            readers.read(placeholder(name), (0,))
    for at in range(ENTRIES - 1):
        readers.read(placeholder(f"another-{at}"), (1,))
        readers.read(placeholder("kept"), (0,))
    assert readers.expected(placeholder("forgotten")) == UNKNOWN and readers.expected(placeholder("kept")) > 4
    for at in range(ENTRIES):
        readers.read(placeholder(str(at))._replace(namespace=Namespace("other")), (1,))
    assert readers.expected(placeholder("kept")) > 4, "another tenant pushes out its own"


def test_a_value_is_read_for_the_last_time_once_others_were_read_no_more_often() -> None:
    """While several are read in step, the next one to be read as often as any is not the last yet."""
    readers, key, found = Readers(), placeholder("a"), list[bool]()
    for value in (1, 2, 1, 2, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4):
        readers.read(key, (value,))
        found.append(readers.is_last(key, (value,)))
    assert found == [*[False] * 8, True, *[False] * 4, True]
    assert not readers.is_last(placeholder("b"), (1,))
