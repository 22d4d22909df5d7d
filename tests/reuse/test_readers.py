"""How many readers the values of a placeholder have had, and so how many the next one is expected to have."""

from __future__ import annotations

import pytest

from kedge.anchors.anchor import PoolKey
from kedge.reuse.runtime import MAX_VALUES, UNKNOWN, Readers
from kedge.structures.bounded import ENTRIES
from kedge.types import Namespace, TenantId, WorkflowId


def placeholder(name: str = "question", tenant: str = "tenant", flow: str = "flow") -> PoolKey:
    return PoolKey(Namespace(TenantId(tenant)), WorkflowId(flow), name)


def read(readers: Readers, values: range, times: int, of: PoolKey | None = None) -> None:
    """Let every value be read so often."""
    for value in values:
        for _ in range(times):
            readers.read(of or placeholder(), (value,))


def test_two_readers_or_the_most_so_far_are_assumed_until_something_is_known() -> None:
    readers = Readers()
    assert readers.expected(placeholder()) == UNKNOWN
    read(readers, range(MAX_VALUES), 1)
    assert readers.expected(placeholder()) == UNKNOWN, "all of them may have more readers yet"
    read(readers, range(2), 2)
    assert readers.expected(placeholder()) == 3, "while no count is final it is the highest one"


def test_a_count_is_not_final_while_its_value_is_read_on() -> None:
    """Neither order nor what lies between matters."""
    readers = Readers()
    for value in range(MAX_VALUES * 3):
        readers.read(placeholder(), (value,))
        readers.read(placeholder(), (-1,))
    assert readers.expected(placeholder()) == pytest.approx(1.0), "the one with many readers still has some"
    read(readers, range(-2 * MAX_VALUES, -MAX_VALUES), 1)
    assert readers.expected(placeholder()) > 2.0, "and none since"


def test_placeholders_are_counted_apart() -> None:
    readers = Readers()
    others = [placeholder("hint"), placeholder(tenant="another"), placeholder(flow="another")]
    for times, of in enumerate(others, start=3):
        read(readers, range(MAX_VALUES + 10), times, of)
    assert [readers.expected(of) for of in others] == pytest.approx([3.0, 4.0, 5.0])
    assert readers.expected(placeholder()) == UNKNOWN


@pytest.mark.parametrize(("before", "after"), [(1, 6), (6, 1)])
def test_a_change_is_followed(before: int, after: int) -> None:
    readers = Readers()
    read(readers, range(MAX_VALUES + 200), before)
    read(readers, range(-MAX_VALUES - 300, 0), after)
    assert readers.expected(placeholder()) == pytest.approx(after, abs=0.1)


def test_the_placeholder_that_was_read_longest_ago_is_forgotten_first() -> None:
    readers, kept = Readers(), placeholder("kept")
    for of in (placeholder(), kept):
        read(readers, range(MAX_VALUES + 10), 4, of)
    for at in range(ENTRIES - 1):
        readers.read(placeholder(f"another-{at}"), (1,))
        readers.read(kept, (0,))
    assert readers.expected(placeholder()) == UNKNOWN
    assert readers.expected(kept) == pytest.approx(4.0)
