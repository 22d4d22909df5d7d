"""The dashboard's memory against a naive twin: what it tells, whose it is, and that it does not grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.common.watched import WatchedEngine
from kedge.engine.echo import EchoEngine
from kedge.server.dashboard.history import (
    BUCKET_SECONDS,
    BUCKETS,
    MAX_AGENTS,
    MAX_CALLS,
    MAX_LISTED,
    MAX_RUNS,
    AgentState,
    History,
    PromptKind,
    kind_of,
)
from kedge.server.http import CallFailure
from kedge.types import (
    AgentId,
    ClientId,
    Completion,
    FinishReason,
    GenerateRequest,
    Miss,
    Namespace,
    Receipt,
    RequestId,
    ReuseMode,
    RunId,
    RunKey,
    SamplingParams,
    Segment,
    Source,
    Span,
    TenantId,
    WorkflowId,
)
from kedge.workflow.forecast import AgentKey
from kedge.workflow.steps import UNKNOWN, NextRun
from tests.engine.conformance import EngineConformance

ACME = TenantId("acme")
COMPUTED, EXACT, TRANSLATED = (PromptKind.COMPUTED, PromptKind.EXACT, PromptKind.TRANSLATED)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def request(
    number: int, agent: str = "solver", run: str = "", tenant: TenantId = ACME, fixed: int | None = None
) -> GenerateRequest:
    return GenerateRequest(
        segments=(Segment((1, 2, 3), "p0"), Segment((4, 5), "p1")),
        request_id=RequestId(f"r{number}"),
        tenant=tenant,
        client=ClientId("c"),
        workflow=WorkflowId("flow"),
        run=RunId(run),
        agent=AgentId(agent),
        fixed=fixed,
    )


def receipt(device: int = 0, host: int = 0, translated: int = 0, computed: int = 0) -> Receipt:
    sizes = {Source.DEVICE: device, Source.HOST: host, Source.TRANSLATED: translated, Source.COMPUTED: computed}
    stops = list(accumulate(sizes.values()))
    spans = (Span(stop - size, stop, source) for (source, size), stop in zip(sizes.items(), stops, strict=True))
    misses = (Miss("p1", "not in the cache"),) if computed else ()
    return Receipt(RequestId("x"), ReuseMode.TRANSLATE, tuple(span for span in spans if span), misses)


def completion(said: Receipt, ttft_ms: float = 10.0, tokens: tuple[int, ...] = (7,)) -> Completion:
    return Completion(RequestId("x"), "a", tokens, FinishReason.STOP, said, ttft_ms, 2 * ttft_ms)


def answer(history: History, asked: GenerateRequest, said: Receipt, ttft_ms: float = 10.0) -> None:
    history.submitted(asked)
    history.begun(asked.tenant, asked.request_id)
    history.ended(asked.tenant, asked.request_id, completion(said, ttft_ms))


def agent_of(state: dict[str, Any], name: str = "solver") -> dict[str, Any]:
    (found,) = [one for one in state["agents"] if one["agent"] == name]
    return found


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (receipt(computed=10), COMPUTED),
        (receipt(device=4, computed=6), COMPUTED),
        (receipt(device=5, computed=5), EXACT),
        (receipt(host=9, computed=1), EXACT),
        (receipt(device=2, translated=2, computed=6), COMPUTED),
        (receipt(device=3, translated=3, computed=4), EXACT),
        (receipt(device=2, translated=4, computed=4), TRANSLATED),
    ],
)
def test_a_time_counts_as_what_most_of_the_prompt_was(said: Receipt, kind: PromptKind) -> None:
    assert kind_of(said) is kind


def test_a_request_waits_runs_and_ends() -> None:
    history, asked = History(Clock()), request(1, run="r", fixed=3)
    seen = []
    for step in (
        lambda: history.submitted(asked),
        lambda: history.begun(ACME, asked.request_id),
        lambda: history.ended(ACME, asked.request_id, completion(receipt(device=2, computed=3))),
    ):
        step()
        state = history.state(ACME)
        seen.append((state["waiting"], state["running"], state["requests"], state["runs"][0]["agents"]["solver"]))
    assert [numbers for *numbers, _ in seen] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert [place["state"] for *_, place in seen] == ["waiting", "running", "done"]
    assert [place["calls"] for *_, place in seen] == [0, 0, 1]
    assert history.fixed_prompts(ACME) == {("flow", "solver"): (Namespace(ACME), (1, 2, 3))}


def test_what_a_receipt_tells() -> None:
    clock = Clock()
    history = History(clock)
    answer(history, request(1, run="r"), receipt(device=2, computed=3), ttft_ms=12.5)
    clock.now += 4
    (told,) = history.state(ACME)["receipts"]
    assert (
        told
        | {
            "number": 1,
            "age_s": 4.0,
            "workflow": "flow",
            "agent": "solver",
            "run": "c/r",
            "state": "done",
            "mode": "translate",
            "kind": "computed",
            "tokens": {"device": 2, "host": 0, "translated": 0, "computed": 3},
            "ttft_ms": 12.5,
            "ttft_load": 1,
            "total_ms": 25.0,
            "total_load": 1,
            "finish_reason": "stop",
            "misses": [{"segment": "p1", "reason": "not in the cache"}],
            "parts_ms": {},
        }
        == told
    )


def test_medians_by_kind() -> None:
    history = History(Clock())
    for number, (said, ttft_ms) in enumerate(
        [(receipt(computed=5), 40), (receipt(computed=5), 50), (receipt(computed=5), 90), (receipt(device=5), 8)]
    ):
        answer(history, request(number), said, ttft_ms)
    assert agent_of(history.state(ACME))["ttft_ms"] == {
        "computed": {"median": 50, "load": 1, "count": 3},
        "exact": {"median": 8, "load": 1, "count": 1},
        "translated": {"median": None, "load": None, "count": 0},
    }


def test_an_answer_without_a_token_has_no_time_to_first_token() -> None:
    history, asked = History(Clock()), request(1)
    history.submitted(asked)
    history.ended(ACME, asked.request_id, completion(receipt(computed=5), tokens=()))
    assert agent_of(history.state(ACME))["ttft_ms"]["computed"]["count"] == 0


def test_a_request_that_fails_or_is_cancelled_leaves_no_receipt() -> None:
    history = History(Clock())
    for number in (1, 2):
        history.submitted(request(number, run="r"))
    history.ended(ACME, RequestId("r1"))
    history.cancelled(RequestId("r2"))
    history.ended(ACME, RequestId("r2"), completion(receipt(computed=5)))
    history.cancelled(RequestId("never seen"))
    state = history.state(ACME)
    assert (state["waiting"], state["running"], state["requests"], state["receipts"]) == (0, 0, 0, [])
    assert state["runs"][0]["agents"]["solver"]["state"] == "stopped"


def test_tenants_see_their_own_with_all_their_salts() -> None:
    history = History(Clock())
    answer(history, replace(request(1), partition="0123"), receipt(computed=5))
    answer(history, request(2, tenant=TenantId("acme2")), receipt(computed=7))
    assert [history.state(TenantId(name))["requests"] for name in ("acme", "acme2", "acm")] == [1, 1, 0]
    assert history.state(ACME)["tokens"]["computed"] == 5


def test_forecasts_tell_who_is_expected() -> None:
    history = History(Clock())

    def told(agent: str, next_run: NextRun | None) -> None:
        history.forecast({AgentKey(Namespace(ACME), "c", RunId("r"), AgentId(agent)): next_run})

    told("nobody", None)
    assert history.state(ACME)["runs"] == []
    told("judge", NextRun(2))
    told("clerk", NextRun(UNKNOWN))
    history.submitted(request(1, "judge", run="r"))
    places = history.state(ACME)["runs"][0]["agents"]
    assert places["judge"] == {"state": "waiting", "calls": 0, "steps": 2}
    assert places["clerk"] == {"state": "expected", "calls": 0, "steps": None}
    assert agent_of(history.state(ACME), "judge")["steps"] == 2
    told("judge", None)
    assert agent_of(history.state(ACME), "judge")["steps"] is None
    told("judge", NextRun(1))
    history.run_ended(RunKey(Namespace(ACME), "c", RunId("r")))
    (run,) = history.state(ACME)["runs"]
    assert (run["ended"], run["agents"]["judge"]["steps"]) == (True, None)
    assert agent_of(history.state(ACME), "judge")["steps"] is None


def test_tokens_over_time() -> None:
    clock = Clock(BUCKET_SECONDS * 100)
    history = History(clock)
    answer(history, request(1), receipt(computed=5))
    answer(history, request(2), receipt(device=2, computed=1))
    clock.now += 2 * BUCKET_SECONDS
    answer(history, request(3), receipt(translated=4))
    series = history.state(ACME)["series"]["tokens"]
    assert {source: tokens[-4:] for source, tokens in series.items()} == {
        "device": [0, 2, 0, 0],
        "host": [0, 0, 0, 0],
        "translated": [0, 0, 0, 4],
        "computed": [0, 6, 0, 0],
    }
    assert {len(tokens) for tokens in series.values()} == {BUCKETS}
    clock.now += BUCKETS * BUCKET_SECONDS
    assert not any(map(any, history.state(ACME)["series"]["tokens"].values()))


def test_nothing_grows() -> None:
    clock = Clock()
    history = History(clock)
    for number in range(MAX_CALLS // 2):
        clock.now += BUCKET_SECONDS
        answer(history, request(number, f"a{number}", run=f"r{number}", fixed=3), receipt(computed=1))
        answer(history, request(-1 - number, "same", run="same"), receipt(computed=1))
        answer(history, request(number, f"b{number}", run="same"), receipt(computed=1))
        agent = AgentKey(Namespace(ACME), "c", RunId("same"), AgentId(f"expected{number}"))
        history.forecast({agent: NextRun(1)})
        history.failed(ACME, CallFailure(400, "bad", "why", agent=f"a{number}"))
    state = history.state(ACME)
    assert [len(state["runs"]), len(state["receipts"]), len(state["failures"]["list"])] == [MAX_RUNS, *[MAX_LISTED] * 2]
    assert sum(one["calls"] for one in state["agents"]) == MAX_CALLS < state["requests"]
    mine = history._tenants[ACME]
    ((_, record),) = [(key, run) for key, run in mine.runs.items() if key.name == "c/same"]
    assert len(record.steps) == MAX_AGENTS
    assert (len(mine.series), len(mine.live), len(mine.calls), len(mine.fixed)) == (BUCKETS, 0, MAX_CALLS, MAX_AGENTS)


def test_the_version_changes_with_what_is_told_and_with_nothing_else() -> None:
    history, asked = History(Clock()), request(1)
    assert history.version(ACME) == history.version(ACME)
    versions = [history.version(ACME)]
    history.submitted(asked)
    versions.append(history.version(ACME))
    history.begun(ACME, asked.request_id)
    versions.append(history.version(ACME))
    history.ended(ACME, asked.request_id)
    versions.append(history.version(ACME))
    history.ended(ACME, asked.request_id)
    assert len(set(versions)) == 4
    assert history.version(ACME) == versions[-1]


@dataclass
class Twin:
    """The same by counting lists."""

    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    answered: int = 0


@given(st.lists(st.tuples(st.sampled_from(["submit", "begin", "answer", "fail", "cancel"]), st.integers(0, 5))))
def test_whatever_happens_the_counts_are_right(happened: list[tuple[str, int]]) -> None:
    history, twin = History(Clock()), Twin()
    for what, number in happened:
        name = RequestId(f"r{number}")
        live = number in twin.waiting + twin.running
        if what == "submit" and not live:
            history.submitted(request(number, f"a{number % 2}", run="r"))
            twin.waiting.append(number)
        elif what == "begin":
            history.begun(ACME, name)
            if number in twin.waiting:
                twin.waiting.remove(number)
                twin.running.append(number)
        elif what in ("answer", "fail", "cancel"):
            if what == "cancel":
                history.cancelled(name)
            else:
                history.ended(ACME, name, completion(receipt(device=2, computed=3)) if what == "answer" else None)
            twin.answered += live and what == "answer"
            for held in (twin.waiting, twin.running):
                held[:] = [one for one in held if one != number]
    state = history.state(ACME)
    assert (state["waiting"], state["running"]) == (len(twin.waiting), len(twin.running))
    assert state["requests"] == twin.answered == sum(one["calls"] for one in state["agents"])
    assert state["tokens"] == {"device": 2 * twin.answered, "host": 0, "translated": 0, "computed": 3 * twin.answered}
    assert sum(one["waiting"] + one["running"] for one in state["agents"]) == state["waiting"] + state["running"]


# the engine that tells ------------------------------------------------------------------------------------------------


@pytest.mark.slow
class TestWatchedEngine(EngineConformance):
    """Being watched changes nothing about an engine."""

    @pytest.fixture
    def engine(self) -> Iterator[WatchedEngine]:
        with EchoEngine(delay_s=2e-4) as engine:
            yield WatchedEngine(engine, History())


def echo_request(number: int, max_tokens: int = 4) -> GenerateRequest:
    segments = (Segment(tuple(b"hello"), "p0"),)
    return GenerateRequest(segments, SamplingParams(max_tokens), request_id=RequestId(f"e{number}"), tenant=ACME)


@pytest.mark.parametrize("reader", [list, lambda stream: stream.result(60)], ids=["iterated", "result"])
def test_the_history_hears_of_answers_before_their_reader_does(reader: Any) -> None:
    history = History()
    with EchoEngine() as engine:
        reader(WatchedEngine(engine, history).submit(echo_request(1)))
    state = history.state(ACME)
    assert (state["requests"], state["waiting"], state["running"]) == (1, 0, 0)
    assert state["tokens"]["computed"] == 5


def test_a_cancelled_stream_that_nobody_reads_is_forgotten() -> None:
    history = History()
    with EchoEngine(delay_s=0.05) as engine:
        watched = WatchedEngine(engine, history)
        stream = watched.submit(echo_request(1, max_tokens=200))
        assert history.state(ACME)["waiting"] == 1
        assert watched.cancel(stream.request_id)
        assert history.state(ACME)["waiting"] == 0


def test_the_page_knows_every_state_source_and_kind() -> None:
    """They are named in its style and its tables."""
    page = files("kedge.server.dashboard") / "static"
    script, style = ((page / name).read_text(encoding="utf-8") for name in ("panels.js", "style.css"))
    assert all(
        f'"{state.replace(" ", "-")}"' in style
        for state in ("healthy", "overloaded", "shutting down", "closed", "failed")
    )
    assert all(f".{state}" in style or state == "expected" for state in AgentState)
    assert all(f"  {source.value}:" in script and f".fill-{source.value}" in style for source in Source)
    assert all(f'"{kind}"' in script for kind in PromptKind)
