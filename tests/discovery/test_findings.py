"""The linter finds what defeats reuse, and nothing in prompts that are in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kedge.discovery import Discovery, PlainRequests
from kedge.discovery.report import COMMON_TEXT, EARLY_VALUE, ROLE_FIRST, find_waste
from kedge.settings import DiscoverySettings
from kedge.types import GenerateRequest, RequestId, Segment, TenantId, Tokens, is_owned
from tests.discovery.teams import judge, solver, words


def found_in(prompt: Callable[[int], Tokens], count: int = 12) -> list[dict[str, Any]]:
    discovery = Discovery()
    for number in range(count):
        discovery.arrive(RequestId(f"{number}"), prompt(number), float(number))
        discovery.ended(RequestId(f"{number}"), (), number + 0.5)
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
            question, answer = words((tenant, number), 60), words((tenant, "answer", number), 20)
            for prompt, reply in ((solver(question, tenant), answer), (judge(question, answer, tenant), ())):
                request = GenerateRequest((Segment(prompt, "p0"),), tenant=TenantId(tenant), is_plain=True)
                requests.arrived(request)
                requests.ended(request.namespace, request.request_id, reply)
    whole, own = requests.report(), requests.report(lambda namespace: is_owned(TenantId("a"), namespace))
    assert (whole["requests"], own["requests"]) == (16, 8)
    assert len(whole["agents"]) == 4 and len(own["agents"]) == 2  # type: ignore[arg-type]
    assert (own["mode"], own["known_agents"]) == ("observe", 4)
