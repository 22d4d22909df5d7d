"""The balance of a workflow: what translation takes and saves, and when that counts."""

from __future__ import annotations

from kedge.policies.balance import LEAST, MARGIN, OF_DEVICE, TRIES, Balances
from kedge.types import GenerateRequest, Segment, TenantId, WorkflowId


def request(workflow: str = "w", tenant: str = "default") -> GenerateRequest:
    return GenerateRequest((Segment((5,), "p0"),), workflow=WorkflowId(workflow), tenant=TenantId(tenant))


def run(balances: Balances, requests: int, spent: float, saved: float, one: GenerateRequest) -> None:
    for _ in range(requests):
        balances.request(one)
        balances.save(one, saved)
        balances.spend(one, spent)


def test_a_workflow_that_loses_is_found_after_some_requests() -> None:
    balances = Balances()
    run(balances, LEAST, 1.0, MARGIN - 0.1, request())
    assert not balances.is_losing(request()), "the first one only opened the balance"
    run(balances, 1, 1.0, MARGIN - 0.1, request())
    assert balances.is_losing(request())


def test_one_that_saves_is_not() -> None:
    balances = Balances()
    run(balances, 10 * LEAST, 1.0, MARGIN + 0.1, request())
    assert not balances.is_losing(request())


def test_beside_a_gpu_the_hosts_time_does_not_count() -> None:
    for saved in (OF_DEVICE - 0.1, OF_DEVICE + 0.1):
        for has_gpu in (False, True):
            balances = Balances(has_gpu=has_gpu)
            for _ in range(2 * LEAST):
                balances.spend(request(), host=100.0)
                run(balances, 1, 1.0, saved, request())
            assert balances.is_losing(request()) == (not has_gpu or saved < OF_DEVICE)


def test_what_was_spent_before_anything_was_saved_does_not_count() -> None:
    balances = Balances()
    for _ in range(10 * LEAST):
        balances.request(request())
        balances.spend(request(), 100.0)
    run(balances, 2 * LEAST, 1.0, MARGIN + 0.1, request())
    assert not balances.is_losing(request())


def test_the_balance_follows_what_changes() -> None:
    balances = Balances()
    run(balances, 3 * LEAST, 2.0, 1.0, request())
    assert balances.is_losing(request())
    run(balances, 3 * LEAST, 1.0, 2 * MARGIN, request())
    assert not balances.is_losing(request())


def test_saving_a_little_is_not_enough() -> None:
    balances = Balances()
    run(balances, LEAST + 1, 1.0, MARGIN - 0.1, request())
    assert balances.is_losing(request())
    for _ in range(20):
        run(balances, TRIES, 1.0, MARGIN - 0.1, request())
        assert balances.is_losing(request())
    run(balances, TRIES + 1, 1.0, MARGIN + 0.1, request())
    assert not balances.is_losing(request())


def test_a_workflow_that_has_lost_is_judged_by_its_tries_alone() -> None:
    balances = Balances()
    run(balances, LEAST + TRIES, 1000.0, 1.0, request())
    assert balances.is_losing(request())
    run(balances, TRIES - 1, 1.0, 2 * MARGIN, request())
    assert balances.is_losing(request()), "one request too few"
    run(balances, 2, 1.0, 2 * MARGIN, request())
    assert not balances.is_losing(request())


def test_workflows_and_tenants_are_apart() -> None:
    balances = Balances()
    run(balances, 2 * LEAST, 2.0, 1.0, request())
    assert not balances.is_losing(request("other")) and not balances.is_losing(request(tenant="other"))
    balances.clear()
    assert not balances.is_losing(request())
