"""Plain requests are completed as far as the settings allow; what a client says stays."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kedge.discovery import Discovery, PlainRequests, Served, plain_requests
from kedge.discovery.bounds import MAX_OF_ONE
from kedge.discovery.report import COMMON_TEXT, EARLY_VALUE, OTHERS, ROLE_FIRST, find_waste
from kedge.settings import DiscoveryMode, DiscoverySettings
from kedge.types import GenerateRequest, ReuseMode, Segment, Tokens, is_owned, new_request_id
from tests.discovery.teams import judge, solver, words


def plain(tokens: Tokens, tenant: str = "default") -> GenerateRequest:
    return GenerateRequest((Segment(tokens, "p0"),), tenant=tenant, is_plain=True)


def run(requests: PlainRequests, number: int, tenant: str = "default") -> tuple[GenerateRequest, GenerateRequest]:
    """Let the team answer a question; returns its requests as they are served."""
    question, answer = words(("q", number), 60), words(("a", number), 25)
    first = plain(solver(question), tenant)
    solved = requests.arrived(first)
    requests.ended(first.namespace, first.request_id, answer)
    second = plain(judge(question, answer), tenant)
    judged = requests.arrived(second)
    requests.ended(second.namespace, second.request_id, ())
    return solved, judged


def learned(mode: DiscoveryMode, runs: int = 4) -> PlainRequests:
    requests = PlainRequests(DiscoverySettings(mode=mode))
    for number in range(runs):
        run(requests, number)
    return requests


def test_with_translate_a_request_has_the_segments_and_names_that_were_found() -> None:
    solved, judged = run(learned(DiscoveryMode.TRANSLATE), 9)
    assert judged.reuse is ReuseMode.TRANSLATE and judged.agent and judged.workflow == solved.workflow
    assert judged.tokens == judge(words(("q", 9), 60), words(("a", 9), 25))
    assert judged.segments[3].sample == solved.produces
    assert judged.fixed == 50


@pytest.mark.parametrize("mode", [DiscoveryMode.OFF, DiscoveryMode.OBSERVE])
def test_without_it_no_request_is_changed(mode: DiscoveryMode) -> None:
    requests = learned(mode)
    given = plain(solver(words("q", 60)))
    assert requests.arrived(given) is given
    assert requests.forecasts.take() is None


def test_with_exact_agents_and_runs_are_named_and_forecast_and_nothing_is_translated() -> None:
    requests = learned(DiscoveryMode.EXACT, runs=7)
    taken = requests.forecasts.take()
    assert taken is not None and requests.forecasts.take() is None
    solved, judged = run(requests, 9)
    assert solved.run == judged.run and solved.agent != judged.agent and not judged.produces
    assert judged.reuse is ReuseMode.EXACT and len(judged.segments) == 1
    assert taken.prompts[solved.agent_key] == solver((), vocab=100_000)[:40]
    assert taken.teams[judged.agent_key] == judged.workflow
    changes = requests.forecasts.take()
    assert changes and changes.next_runs[solved.agent_key] == (0, 1)


def test_what_could_be_saved_is_counted_without_being_used() -> None:
    requests = learned(DiscoveryMode.OBSERVE)
    before = requests.totals.shared_tokens
    run(requests, 9)
    assert requests.totals.shared_tokens - before == 60 + 25
    assert (requests.totals.requests, requests.totals.known_agents) == (10, 6)


def test_what_a_client_says_stays() -> None:
    requests = learned(DiscoveryMode.TRANSLATE)
    given = replace(plain(solver(words("q", 60))), agent="mine", workflow="own", fixed=3)
    served = requests.arrived(given)
    assert (served.agent, served.workflow, served.fixed) == ("mine", "own", 3)
    assert [one.is_placeholder for one in served.segments] == [False, True, False]
    for refused in (replace(given, is_plain=False), replace(given, reuse=ReuseMode.OFF)):
        assert requests.arrived(refused) is refused


def test_what_was_saved_and_why_other_text_was_not_is_reported() -> None:
    requests = PlainRequests(DiscoverySettings())
    for number in range(40):
        request = plain(words(number, 40))
        requests.arrived(request)
        letter = chr(ord("a") + number % 20)
        reasons = (f"only {number}% of the prompt could be translated", f"reason {letter}")
        requests.ended(request.namespace, request.request_id, (), Served(16, number % 2, reasons))
    requests.ended(request.namespace, "unknown", (), Served(1000, 1000))
    report: Any = requests.report()
    assert (report["exact_tokens"], report["translated_tokens"]) == (40 * 16, 20)
    assert requests.totals.exact_tokens == 40 * 16
    assert report["why_not"][0] == ("only N% of the prompt could be translated", 40)
    assert len(report["why_not"]) == MAX_OF_ONE + 1 and dict(report["why_not"])[OTHERS] == 10
    assert report["prompt_tokens"] == 1600


def test_an_error_costs_a_request_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    requests = learned(DiscoveryMode.TRANSLATE)

    def fails(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Discovery, "arrive", fails)
    given = plain(solver(words("q", 60)))
    assert requests.arrived(given) is given
    assert requests.totals.failures == 1 and str(given.request_id) in caplog.text


def test_namespaces_are_bounded_and_the_last_to_ask_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_requests, "MAX_NAMESPACES", 2)
    requests = learned(DiscoveryMode.TRANSLATE)
    for tenant in ("b", "default", "c"):
        run(requests, 20, tenant)
    for number in range(3):
        requests.arrived(replace(plain(words("c", 40), "c"), partition=f"salt {number}"))
    assert run(requests, 21)[1].agent
    unknown = plain(words("b", 40), "b")
    requests.ended(unknown.namespace, new_request_id(), (1, 2))
    requests.ended(unknown.namespace, unknown.request_id)
    requests.clear()
    assert not run(requests, 22)[1].agent


def test_what_was_forgotten_is_not_expected_until_it_is_found_again() -> None:
    now = count(step=5.0)
    requests = PlainRequests(DiscoverySettings(mode=DiscoveryMode.EXACT), lambda: next(now))
    for _ in range(2):
        for number in range(9):
            run(requests, number)
        assert (taken := requests.forecasts.take()) and taken.prompts
        requests.clear()
        assert (taken := requests.forecasts.take()) and not any(taken.next_runs.values())
    assert not requests.forecasts._board.ignored


@pytest.mark.parametrize("mode", [DiscoveryMode.EXACT, DiscoveryMode.TRANSLATE])
def test_what_a_tenant_sees_does_not_depend_on_what_another_sends(mode: DiscoveryMode) -> None:
    """A client that repeats a stranger's text, to find out whether it was sent, is answered as if it never was."""
    after, alone = learned(mode, runs=6), PlainRequests(DiscoverySettings(mode=mode))
    for number in range(8):
        seen = [run(requests, number, tenant="prober") for requests in (after, alone)]
        ours, theirs = ([replace(one, request_id=new_request_id(), produces=None) for one in pair] for pair in seen)
        assert [anonymous(one) for one in ours] == [anonymous(one) for one in theirs]
    reports = [requests.report(lambda namespace: is_owned("prober", namespace)) for requests in (after, alone)]
    assert reports[0] == reports[1]


def anonymous(request: GenerateRequest) -> tuple[object, ...]:
    """What a request is served as, without the names of answers, which follow from ids of requests."""
    kinds = [(one.tokens, one.name, one.sample and one.sample.kind) for one in request.segments]
    return kinds, request.agent, request.workflow, request.run, request.reuse, request.fixed


def found_in(prompt: Callable[[int], Tokens], count: int = 12) -> list[dict[str, Any]]:
    discovery = Discovery()
    for number in range(count):
        discovery.arrive(f"{number}", prompt(number), float(number))
        discovery.ended(f"{number}", (), number + 0.5)
    return find_waste(list(discovery.agents.values()))


def test_a_time_in_the_system_prompt_is_found_with_what_it_costs() -> None:
    def stamped(number: int) -> Tokens:
        return (*words("head", 40), *words(("time", number), 9), *words("rules", 700), *words(("q", number), 50), 1, 2)

    (finding,) = found_in(stamped)
    assert (finding["kind"], finding["tokens_per_call"]) == (EARLY_VALUE, 700)
    assert finding["calls"] == 10, "from the third on"


def test_each_agent_is_named_once_however_many_orders_there_are() -> None:
    orders = ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1))

    def unordered(number: int) -> Tokens:
        tools = [words(("tool", one), 60) for one in orders[number % 4]]
        return (*words("system", 20), *sum(tools, ()), *words(("q", number), 40), 1, 2)

    findings = [one for one in found_in(unordered, 24) if one["kind"] is COMMON_TEXT]
    assert len(findings) == len({one["agent"] for one in findings}) == 3
    assert min(one["tokens_per_call"] for one in findings) >= 120


def test_rules_behind_a_role_are_found() -> None:
    def roled(number: int) -> Tokens:
        role = words(("role", number % 2), 3 + number % 2)
        return (7, *role, *words("rules", 150), *words(("q", number), 40), 1, 2)

    (finding,) = found_in(roled)
    assert finding["kind"] is COMMON_TEXT and 150 <= finding["tokens_per_call"] <= 154


def test_a_role_before_shared_text_is_found() -> None:
    def prompt(number: int) -> Tokens:
        question = words(("q", number // 2), 80)
        return judge(question, words(("a", number // 2), 20)) if number % 2 else solver(question)

    findings = found_in(prompt)
    assert {one["kind"] for one in findings} == {ROLE_FIRST}
    assert max(one["tokens_per_call"] for one in findings) == 80


def test_nothing_is_found_in_prompts_that_are_in_order() -> None:
    assert found_in(lambda number: (*words("head", 100), *words(("q", number), 50), *words("end", 60))) == []
    assert find_waste([]) == []


def test_a_report_has_what_was_found_of_one_tenant_and_no_text() -> None:
    requests = PlainRequests(DiscoverySettings())
    for tenant in ("a", "b"):
        for number in range(4):
            run(requests, number, tenant)
    whole, own = requests.report(), requests.report(lambda namespace: is_owned("a", namespace))
    assert (whole["requests"], own["requests"]) == (16, 8)
    assert len(whole["agents"]) == 4 and len(own["agents"]) == 2  # type: ignore[arg-type]
    assert (own["mode"], own["known_agents"]) == ("observe", 4)
