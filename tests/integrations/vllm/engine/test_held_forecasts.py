"""Forecasts go with the next request of their run, or alone a little later; none is lost or sent late."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kedge.integrations.vllm.engine.requests import HOLD_S, HeldForecasts, PluginMessage
from kedge.types import Namespace, TenantId

MINE, OTHERS = Namespace(TenantId("mine")), Namespace(TenantId("others"))


class Outgoing:
    """What was sent, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.sent: list[PluginMessage] = []
        self.now, self._due = 0.0, list[tuple[float, Callable[[], None]]]()
        self.held = HeldForecasts(self.sent.append, lambda seconds, call: self._due.append((self.now + seconds, call)))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = [call for at, call in self._due if at <= self.now]
        self._due = [(at, call) for at, call in self._due if at > self.now]
        for call in due:
            call()


def forecast(seq: int, run: str = "r", namespace: Namespace = MINE) -> PluginMessage:
    return PluginMessage(namespace, {"run": run, "seq": seq, "steps": {"a": float(seq)}})


def test_a_request_carries_the_forecast_of_its_run() -> None:
    out = Outgoing()
    out.held.pass_on(forecast(1))
    assert out.held.take(MINE, {"run": "r", "agent": "a"}) == {"steps": {"a": 1.0}, "seq": 1}
    out.wait(HOLD_S)
    assert not out.sent and out.held.take(MINE, {"run": "r"}) == {}


def test_requests_of_other_runs_clients_and_tenants_do_not() -> None:
    out = Outgoing()
    out.held.pass_on(forecast(1))
    for namespace, hints in (
        (OTHERS, {"run": "r"}),
        (MINE, {"run": "s"}),
        (MINE, {"run": "r", "client": "c"}),
        (MINE, {}),
    ):
        assert out.held.take(namespace, hints) == {}
    out.wait(HOLD_S)
    assert out.sent == [forecast(1)]


def test_the_newest_is_sent_when_the_first_is_due() -> None:
    out = Outgoing()
    out.held.pass_on(forecast(1))
    out.wait(0.8 * HOLD_S)
    out.held.pass_on(forecast(2))
    assert not out.sent
    out.wait(0.2 * HOLD_S)
    assert out.sent == [forecast(2)], "a client that sends them without end delays none"


def test_an_expected_prompt_carries_it_too() -> None:
    out = Outgoing()
    out.held.pass_on(forecast(3))
    out.held.pass_on(PluginMessage(MINE, {"run": "r", "agent": "b", "ahead": True}, (1, 2)))
    assert out.sent == [PluginMessage(MINE, {"run": "r", "agent": "b", "ahead": True, **forecast(3).hints}, (1, 2))]


def test_fixed_prompts_go_at_once_and_before_the_forecast_that_names_their_agents() -> None:
    out, fixed = Outgoing(), PluginMessage(MINE, {"run": "r", "agent": "a", "fixed_tokens": 2}, (1, 2))
    out.held.pass_on(forecast(1))
    out.held.pass_on(fixed)
    out.wait(HOLD_S)
    assert out.sent == [fixed, forecast(1)]


def test_nothing_is_expected_of_a_run_that_has_ended() -> None:
    out, end = Outgoing(), PluginMessage(MINE, {"run": "r", "final": True})
    out.held.pass_on(forecast(1))
    out.held.pass_on(end)
    out.wait(HOLD_S)
    assert out.sent == [end]


@given(st.lists(st.tuples(st.sampled_from("rs"), st.sampled_from(["forecast", "take", "wait"])), max_size=40))
def test_the_last_forecast_of_every_run_arrives_in_order(events: list[tuple[str, str]]) -> None:
    out, arrived, last = Outgoing(), dict[str, list[int]](r=[], s=[]), dict[str, int]()
    for seq, (run, event) in enumerate(events):
        if event == "forecast":
            out.held.pass_on(forecast(seq, run))
            last[run] = seq
        elif event == "take":
            arrived[run] += [one for name, one in out.held.take(MINE, {"run": run}).items() if name == "seq"]
        else:
            out.wait(0.4 * HOLD_S)
        for sent in out.sent:
            arrived[sent.hints["run"]].append(sent.hints["seq"])
        out.sent.clear()
    out.wait(HOLD_S)
    for sent in out.sent:
        arrived[sent.hints["run"]].append(sent.hints["seq"])
    assert all(seqs == sorted(set(seqs)) for seqs in arrived.values())
    assert {run: seqs[-1] for run, seqs in arrived.items() if seqs} == last
