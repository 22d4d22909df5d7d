"""The order of service against a naive twin, its bound under hostile look-ups, and the sum of live contexts;
and that cold prompts are held back only under all conditions together, and never where nothing runs.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kedge.errors import PlanError
from kedge.policies.service import (
    ACTIVE_SHARE,
    LOOK_UP_TOKENS,
    MOST,
    PATIENCE,
    WAIT_SHARE,
    LiveContexts,
    ServiceOrder,
    StepTimes,
    may_start,
    missing_share,
)
from kedge.policies.sessions.turns import RECENT

SHARES = st.floats(-1, 2, allow_nan=False)


def order_of(missing: dict[str, float], tokens: int = 1) -> ServiceOrder[str]:
    order: ServiceOrder[str] = ServiceOrder(missing.__getitem__)
    for item in missing:
        order.push(item, tokens)
    return order


EVENTS = st.lists(st.one_of(st.just("arrive"), st.just("serve"), st.just("withdraw"), SHARES), max_size=120)


@settings(max_examples=120)
@given(EVENTS, st.booleans(), st.data())
def test_nobody_is_passed_by_more_than_the_bound(
    events: list[str | float], overloaded: bool, data: st.DataObject
) -> None:
    """However look-ups are answered, whatever was answered before."""
    answers: dict[int, float] = {}
    order: ServiceOrder[int] = ServiceOrder(lambda item: answers.get(item, 1.0))
    passed: Counter[int] = Counter()
    together: dict[int, int] = {}
    arrivals = 0
    for version, event in enumerate(events):
        if event == "arrive":
            arrivals += 1
            order.push(arrivals, data.draw(st.integers(1, LOOK_UP_TOKENS)))
            together[arrivals] = 0
            together = {item: max(most, len(order)) for item, most in together.items()}
        elif event == "serve" and together:
            first = order.order(version, overloaded)[0]
            order.remove(first)
            del together[first]
            passed.update(item for item in together if item < first)
            assert all(passed[item] <= PATIENCE * most for item, most in together.items())
        elif event == "withdraw" and together:
            item = data.draw(st.sampled_from(sorted(together)))
            order.remove(item)
            del together[item]
        elif isinstance(event, float) and together:
            answers[data.draw(st.sampled_from(sorted(together)))] = event


@dataclass(eq=False)
class Item:
    """Something that waits, and is neither more nor less than another."""

    number: int


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 100), st.booleans()), max_size=30), st.booleans())
def test_the_order_is_that_of_a_naive_look(items: list[tuple[float, int, bool]], overloaded: bool) -> None:
    asked = list[Item]()
    order: ServiceOrder[Item] = ServiceOrder(lambda item: asked.append(item) or items[item.number][0])
    known = [Item(number) for number in range(len(items))]
    for one, (_, tokens, is_first) in zip(known, items, strict=True):
        order.push(one, tokens, is_first=is_first)
        assert one in order.in_order
    for one in known[::2]:
        order.remove(one)
    kept = known[1::2]
    slack = PATIENCE * len(kept) * overloaded
    naive = sorted(kept, key=lambda one: (not items[one.number][2], one.number + 1 + slack * items[one.number][0]))
    assert order.order(0, overloaded) == naive and (overloaded or not asked)


def test_look_ups_are_bounded_and_the_first_one_is_new() -> None:
    asked: list[int] = []
    shares = dict.fromkeys(range(100), 0.5)

    def look_up(item: int) -> float:
        asked.append(item)
        return shares[item]

    order: ServiceOrder[int] = ServiceOrder(look_up)
    for item in shares:
        order.push(item, LOOK_UP_TOKENS // 4)
    for _ in range(25):
        order.order(0, overloaded=True)
    assert sorted(asked) == list(range(100)), "each once while nothing has changed"
    assert order.order(0, overloaded=True) is order.order(0, overloaded=True) and len(asked) == 100
    shares[50] = 0.0
    asked.clear()
    order.order(1, overloaded=True)
    assert len(asked) <= 5
    for _ in range(25):
        first = order.order(1, overloaded=True)[0]
        assert first in asked
    assert first == 50 and len(asked) == 100


def test_who_is_first_by_an_old_look_up_is_looked_up_before_it_is_served() -> None:
    shares = {"evicted since": 0.0, "a": 0.5, "b": 0.5}
    order = order_of(shares, LOOK_UP_TOKENS)
    for _ in range(3):
        first = order.order(0, overloaded=True)[0]
    order.remove("a")
    order.push("a", LOOK_UP_TOKENS)
    assert first == "evicted since"
    shares["evicted since"] = 1.0
    assert order.order(1, overloaded=True) == ["b", "a", "evicted since"]


def test_a_prompt_beyond_the_budget_is_looked_up_all_the_same() -> None:
    order = order_of({"a": 1.0, "b": 0.0}, 10 * LOOK_UP_TOKENS)
    assert order.missing("b") == 1.0, "until it is looked up"
    for _ in range(2):
        order.order(0, overloaded=True)
    assert order.order(0, overloaded=True) == ["b", "a"]


def test_errors_name_the_item() -> None:
    order = order_of({"a": 1.0})
    assert "a" in order and len(order) == 1
    with pytest.raises(PlanError, match="waits already"):
        order.push("a", 1)
    order.remove("a")
    with pytest.raises(PlanError, match="does not wait"):
        order.remove("a")
    assert order.order(0, overloaded=True) == []


def test_loading_costs_a_part_of_computing() -> None:
    assert missing_share(100, 100) == 0.0
    assert missing_share(100, 0) == 1.0
    assert missing_share(100, 50, 40) == pytest.approx(0.14)
    assert missing_share(0, 0) == 0.0
    assert missing_share(10, 12) == 0.0, "blocks may be counted beyond the prompt"


class ContextsMachine(RuleBasedStateMachine):
    """Live contexts against requests and idle sessions that are kept naively."""

    LIMIT, IDLE = 3, 10.0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.live = LiveContexts(lambda: self.now, self.IDLE, self.LIMIT)
        self.requests: dict[str, tuple[int | None, int]] = {}
        self.idle: dict[int, tuple[float, int]] = {}

    @rule(number=st.integers(0, 9), session=st.integers(0, 5) | st.none(), tokens=st.integers(0, 9))
    def begin(self, number: int, session: int | None, tokens: int) -> None:
        request = f"request {number}"
        self.live.began(request, session, tokens)
        if request not in self.requests:
            self.requests[request] = session, tokens
            self.idle.pop(session, None)  # type: ignore[arg-type]

    @rule(number=st.integers(0, 9), grown=st.integers(0, 9))
    def end(self, number: int, grown: int) -> None:
        session, tokens = self.requests.pop(f"request {number}", (None, 0))
        self.live.ended(f"request {number}", tokens + grown)
        if session is not None and all(other != session for other, _ in self.requests.values()):
            self.idle[session] = self.now, tokens + grown
            while len(self.idle) > self.LIMIT:
                del self.idle[next(iter(self.idle))]

    @rule(seconds=st.sampled_from([0.5, 5.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def is_the_sum_of_what_is_live(self) -> None:
        self.live.check_integrity()
        self.idle = {one: (at, tokens) for one, (at, tokens) in self.idle.items() if self.now - at < self.IDLE}
        busy: dict[object, int] = {}
        for request, (session, tokens) in self.requests.items():
            context = request if session is None else session
            busy[context] = max(tokens, busy.get(context, 0))
        assert len(self.live) == len(self.requests)
        assert self.live.tokens() == sum(busy.values()) + sum(tokens for _, tokens in self.idle.values())


TestLiveContexts = ContextsMachine.TestCase


# active runs ----------------------------------------------------------------------------------------------------------

CAPACITY = 1000
ROOM = int(ACTIVE_SHARE * CAPACITY)
shares, tokens = st.floats(0, 1), st.integers(1, 2 * CAPACITY)


def times(decode: float = 0.001, per_token: float = 0.01, answer: int = 10) -> StepTimes:
    """Times in which an answer takes 0.01 seconds and a prompt of 100 tokens one."""
    found = StepTimes()
    found.step(1, 1, decode)
    found.step(1000, 1, 1000 * per_token)
    found.answered(answer)
    return found


SHORT = times()


@given(tokens, shares, st.just(0) | tokens, shares)
def test_a_prompt_is_held_back_only_if_cold_while_others_run_and_sessions_come_back(
    size: int, missing: float, running: int, returning: float
) -> None:
    cold = running and min(missing, returning) >= MOST
    assert cold or may_start(size, missing, running, CAPACITY, returning, SHORT)


def test_a_cold_prompt_waits_until_little_runs() -> None:
    assert may_start(100, 1.0, ROOM - 100, CAPACITY, 1.0, SHORT)
    assert not may_start(100, 1.0, ROOM - 99, CAPACITY, 1.0, SHORT)
    assert not may_start(100, MOST, ROOM, CAPACITY, MOST, SHORT)


def test_what_takes_less_time_than_the_answers_before_it_is_not_held_back() -> None:
    answer_s = 10 * SHORT.decode
    edge = round(answer_s / (WAIT_SHARE * SHORT.per_token))
    assert not may_start(100 * edge, 1.0, CAPACITY, CAPACITY, 1.0, SHORT)
    assert may_start(100, 1.0, CAPACITY, CAPACITY, 1.0, times(answer=1000))
    assert may_start(100, 1.0, CAPACITY, CAPACITY, 1.0, times(decode=1.0))


def test_before_steps_were_measured_nothing_is_held_back() -> None:
    only_decodes, only_prompts = StepTimes(), StepTimes()
    only_decodes.step(1, 1, 0.001)
    only_prompts.step(1000, 1, 10.0)
    for unknown in (StepTimes(), only_decodes, only_prompts):
        assert may_start(100, 1.0, CAPACITY, CAPACITY, 1.0, unknown)


def test_idle_time_between_steps_is_forgotten_and_slower_machines_are_noticed() -> None:
    found = times()
    found.step(1, 1, 100.0)
    assert found.decode < 0.002
    for _ in range(1000):
        found.step(1, 1, 0.5)
    assert found.decode == 0.5
    found.answered(50)
    assert found.answer == pytest.approx(10 + 40 * RECENT), "the mean of answers moves"
