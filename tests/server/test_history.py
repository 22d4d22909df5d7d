"""The dashboard's memory against a naive twin: what it tells, whose it is, and that it does not grow."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.common.watched import WatchedEngine
from kedge.engine.echo import EchoEngine
from kedge.server import history as history_module
from kedge.server.history import REMEMBERED, History, text_of
from kedge.server.http import CallFailure
from kedge.structures.bounded import ENTRIES
from kedge.types import AgentKey, Completion, FinishReason, GenerateRequest, Miss, Namespace, Receipt, Segment
from kedge.workflow.steps import NextRun
from tests import completions
from tests.engine.conformance import EngineConformance

ACME, OTHER = "acme", "other"


def request(number: int, agent: str = "solver", tenant: str = ACME, **more: Any) -> GenerateRequest:
    segments = Segment((1, 2, 3), "p0"), Segment((4, 5), "p1")
    whose = {"tenant": tenant, "client": "c", "workflow": "flow", "agent": agent}
    return GenerateRequest(segments, request_id=f"{tenant}{number}", **whose, **more)


def receipt(computed: int, device: int = 0) -> Receipt:
    found = completions.completion(exact=device, computed=computed).receipt
    return replace(found, misses=(Miss("p1", "not in the cache"),))


def completion(said: Receipt, ttft_ms: float = 10.0, end: FinishReason = FinishReason.STOP) -> Completion:
    return Completion("x", "a", (7,), end, said, ttft_ms, 2 * ttft_ms)


def answer(history: History, asked: GenerateRequest, said: Receipt, ttft_ms: float = 10.0) -> None:
    history.submitted(asked)
    history.begun(asked.tenant, asked.request_id)
    history.ended(asked.tenant, asked.request_id, completion(said, ttft_ms))


def test_what_a_call_tells_until_its_receipt() -> None:
    now = [1000.0]
    history, asked = History(lambda: now[0]), request(1, run="r", fixed=3)
    history.submitted(asked)
    history.submitted(request(2))
    place = {"number": 1, "workflow": "flow", "agent": "solver", "run": "c/r", "load": 1}
    first, second = history.state(ACME)["calls"]
    assert first == {**place, "age_s": 0.0, "state": "waiting"} and second["load"] == 2
    history.begun(ACME, asked.request_id)
    assert history.state(ACME)["calls"][0]["state"] == "running"
    history.ended(ACME, asked.request_id, completion(receipt(device=2, computed=3), ttft_ms=12.5))
    now[0] += 4
    told = {
        **place,
        "age_s": 4.0,
        "state": "done",
        "mode": "translate",
        "tokens": {"device": 2, "host": 0, "translated": 0, "computed": 3},
        "ttft_ms": 12.5,
        "total_ms": 25.0,
        "answer_tokens": 1,
        "finish_reason": "stop",
        "misses": [{"segment": "p1", "reason": "not in the cache"}],
        "parts_ms": {},
    }
    (found,) = (call for call in history.state(ACME)["calls"] if call["number"] == 1)
    assert found | told == found
    assert history.fixed_prompts(ACME) == {(Namespace(ACME), "flow", "solver"): (1, 2, 3)}


def test_texts_are_kept_of_those_who_allow_it_and_go_with_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(keeps_texts=lambda tenant: tenant == ACME)
    for tenant in (ACME, OTHER):
        answer(history, request(1, tenant=tenant), receipt(device=2, computed=3))
    assert history.texts(OTHER, 1) == (None, None)
    asked, done = history.texts(ACME, 1) or (None, None)
    assert asked and done
    with EchoEngine() as engine:
        text = text_of(asked, done, engine.tokenizer)
    assert text["answer"] == "a"
    pieces = [(one["segment"], one["source"], len(one["text"])) for one in text["prompt"]]
    assert pieces == [("p0", "device", 2), ("p0", "computed", 1), ("p1", "computed", 2)]
    monkeypatch.setattr(history_module, "MAX_TEXT_TOKENS", 20)
    for number in range(2, 8):
        answer(history, request(number), receipt(computed=5))
    assert [number for number in range(1, 8) if history.texts(ACME, number) != (None, None)] == [5, 6, 7]


def test_nothing_grows() -> None:
    history, said = History(), replace(receipt(computed=1), misses=(Miss("p1", "why"),) * 999)
    for number in range(ENTRIES + 9):
        answer(history, request(number, f"a{number}", run=f"r{number}", fixed=3), said)
        history.forecast({AgentKey(Namespace(ACME), "c", "r", f"expected{number}"): NextRun(1)})
        history.failed(ACME, CallFailure(400, "bad", "why", agent=f"a{number}"))
    state = history.state(ACME)
    assert [len(state[part]) for part in ("calls", "steps", "failures")] == [ENTRIES, ENTRIES, REMEMBERED]
    assert len(history.fixed_prompts(ACME)) == len(state["calls"][0]["misses"]) == REMEMBERED
    assert not history._tenants[ACME].live


ENDS = {
    "answer": completion(receipt(computed=3)),
    "cancel": completion(receipt(computed=3), end=FinishReason.CANCELLED),
    "fail": None,
}


@given(st.lists(st.tuples(st.sampled_from(["submit", "begin", *ENDS]), st.integers(0, 5))))
def test_whatever_happens_the_states_are_right(happened: list[tuple[str, int]]) -> None:
    counted, live, over = list[Completion](), dict[int, str](), Counter[str]()
    history = History(count=lambda _, completion: counted.append(completion))
    for what, number in happened:
        name = request(number).request_id
        if what == "submit" and number not in live:
            history.submitted(request(number, f"a{number % 2}", run="r"))
            live[number] = "waiting"
        elif what == "begin" and number in live:
            history.begun(ACME, name)
            live[number] = "running"
        elif what in ENDS and live.pop(number, None):
            history.ended(ACME, name, ENDS[what])
            over["done" if what == "answer" else "stopped"] += 1
            assert counted[-1:] == [ENDS[what]] or not ENDS[what]
    calls = history.state(ACME)["calls"]
    assert Counter(call["state"] for call in calls) == Counter(live.values()) + over
    assert all(("tokens" in call) == (call["state"] == "done") for call in calls)
    assert [call["number"] for call in calls] == list(range(1, len(calls) + 1))


# the engine that tells ------------------------------------------------------------------------------------------------


@pytest.mark.slow
class TestWatchedEngine(EngineConformance):
    """Being watched changes nothing about an engine."""

    @pytest.fixture
    def engine(self) -> Iterator[WatchedEngine]:
        with EchoEngine(delay_s=2e-4) as engine:
            yield WatchedEngine(engine, History())
