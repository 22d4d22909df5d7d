"""What translating a placeholder's values is expected to spare: all of them, until experience says less."""

from __future__ import annotations

import pytest

from kedge.anchors.anchor import PoolKey
from kedge.reuse.planner import TRIED, Savings
from kedge.structures.bounded import ENTRIES
from kedge.types import Namespace, TenantId, WorkflowId


def placeholder(name: str = "question") -> PoolKey:
    return PoolKey(Namespace(TenantId("tenant")), WorkflowId("flow"), name)


def values(*, tried: bool) -> list[tuple[int, ...]]:
    """Values of which `expected` assumes the best, or those of which it does not."""
    return [value for at in range(200) if (hash(value := (at, at + 1)) % TRIED == 0) == tried]


def test_while_nothing_is_known_all_of_a_value_is_spared() -> None:
    assert Savings().expected(placeholder(), (1, 2, 3)) == 3


def test_the_share_that_was_spared_lately_is_expected_of_the_next_value() -> None:
    savings = Savings()
    for _ in range(200):
        savings.observe(placeholder(), 40, 10)
    for value in values(tried=False):
        assert savings.expected(placeholder(), value) == pytest.approx(2 * 0.25)
    assert savings.expected(placeholder("another"), values(tried=False)[0]) == 2, "each placeholder for itself"


def test_what_has_changed_counts_more_than_what_was() -> None:
    savings, value = Savings(), values(tried=False)[0]
    for spared in (0, 40):
        for _ in range(100):
            savings.observe(placeholder(), 40, spared)
    assert savings.expected(placeholder(), value) == pytest.approx(2, rel=0.01)


def test_one_value_in_so_many_is_tried_whatever_is_known() -> None:
    """Else a placeholder that once did not pay would never be looked at again."""
    savings = Savings()
    savings.observe(placeholder(), 40, 0)
    assert all(savings.expected(placeholder(), value) == 2 for value in values(tried=True))
    assert all(savings.expected(placeholder(), value) == 0 for value in values(tried=False))
    assert 200 / TRIED / 3 < len(values(tried=True)) < 3 * 200 / TRIED


def test_the_placeholder_that_was_translated_longest_ago_is_forgotten() -> None:
    savings, value = Savings(), values(tried=False)[0]
    for at in range(ENTRIES + 1):
        savings.observe(placeholder(str(at)), 40, 0)
    assert savings.expected(placeholder("0"), value) == 2
    assert savings.expected(placeholder("1"), value) == 0
